"""tools/check_isa.py: planted instructions are caught, wherever they hide; clean code passes."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def load(name: str) -> ModuleType:
    sys.path.insert(0, str(TOOLS))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(TOOLS))


check_isa = load("check_isa")

MARCH = {"x86_64": "-march=x86-64-v2", "aarch64": "-march=armv8-a"}
# Instructions as an assembler takes them, one at least for every extension of the architecture that objdump decodes.
FOREIGN = {
    "x86_64": [
        "vmovss 4(%rdi),%xmm0",
        "vaddps %xmm0,%xmm1,%xmm2",
        "vfmadd231ps %ymm0,%ymm1,%ymm2",
        "vcvtph2ps %xmm0,%ymm0",
        "vpaddd %ymm0,%ymm1,%ymm2",
        "vaddps %zmm0,%zmm1,%zmm2",
        "vpdpbusd %zmm0,%zmm1,%zmm2",
        "{vex} vpdpbusd %ymm0,%ymm1,%ymm2",
        "vdpbf16ps %zmm0,%zmm1,%zmm2",
        "vaddph %zmm0,%zmm1,%zmm2",
        "kmovw %eax,%k1",
        "tdpbssd %tmm0,%tmm1,%tmm2",
        "mulx %rax,%rbx,%rcx",
        "pdep %rax,%rbx,%rcx",
        "andn %rax,%rbx,%rcx",
        "blsr %rax,%rbx",
        "shlx %rax,%rbx,%rcx",
        "lzcnt %eax,%eax",
        "movbe (%rdi),%eax",
        "adcx %eax,%ebx",
        "aesenc %xmm0,%xmm1",
        "pclmulqdq $0,%xmm0,%xmm1",
        "sha256msg1 %xmm0,%xmm1",
        "gf2p8mulb %xmm0,%xmm1",
        "rdrand %eax",
        "rdseed %eax",
        "rdtscp",
        "rdfsbase %rax",
        "xsave (%rdi)",
        "xgetbv",
        "clwb (%rdi)",
        "movdiri %eax,(%rdi)",
        "vpermil2ps $0,%xmm0,%xmm1,%xmm2,%xmm3",
        ".byte 0xd5,0x00,0x01,0xc0",
    ],
    "aarch64": [
        "crc32w w0, w1, w2",
        "ldaddal w0, w1, [x2]",
        "casal w0, w1, [x2]",
        "swpb w0, w1, [x2]",
        "caspal x0, x1, x2, x3, [x4]",
        "sqrdmlah v0.4s, v1.4s, v2.4s",
        "retaa",
        "pacia x0, x1",
        "ldraa x0, [x1]",
        "ldapr w0, [x1]",
        "stlur w0, [x1]",
        "fadd v0.8h, v1.8h, v2.8h",
        "fadd h0, h1, h2",
        "fmlal v0.4s, v1.4h, v2.4h",
        "fcmla v0.4s, v1.4s, v2.4s, #90",
        "fjcvtzs w0, d0",
        "sdot v0.4s, v1.16b, v2.4b[0]",
        "smmla v0.4s, v1.16b, v2.16b",
        "usdot v0.4s, v1.16b, v2.16b",
        "bfmmla v0.4s, v1.8h, v2.8h",
        "bfcvtn v0.4h, v1.4s",
        "rmif x0, #1, #2",
        "frint32z v0.4s, v1.4s",
        "aese v0.16b, v1.16b",
        "sha256h q0, q1, v2.4s",
        "eor3 v0.16b, v1.16b, v2.16b, v3.16b",
        "sb",
        "dc cvap, x0",
        "mrs x0, rndr",
        "irg x0, x1",
        "ptrue p0.b",
        "ld1w {z0.s}, p0/z, [x0]",
        "cntb x0",
        "whilelt p0.s, x0, x1",
        "smlalb z0.s, z1.h, z2.h",
        "smstart",
        ".inst 0x4e82a420",  # smmla by its number
        ".inst 0xc1a01c00",  # add of SME2, which the tables of older disassemblers lack
    ],
}
BASELINE = {
    "x86_64": [
        "lock cmpxchg %rdx,(%rdi)",
        "cmpxchg16b (%rdi)",
        "pshufb %xmm1,%xmm0",
        "pcmpgtq %xmm1,%xmm0",
        "crc32q %rax,%rbx",
        "popcnt %rax,%rax",
        "endbr64",
        "rep bsf %eax,%eax",  # the bytes of tzcnt
        "cs nopw 0(%rax,%rax,1)",
        ".byte 0x66,0x66,0x2e,0x0f,0x1f,0x84,0,0,0,0,0",
        "rep stosb",
        "repz ret",
        "1: jne 1b",
        "call f",
        "jmp *f(,%rax,8)",
        "cpuid",
        "pause",
    ],
    "aarch64": [
        "fmla v0.4s, v1.4s, v2.s[0]",
        "ld1 {v0.16b}, [x0]",
        "smlal v0.4s, v1.4h, v2.4h",
        "fcvtl v0.4s, v1.4h",
        "fcvt s0, h0",
        "cnt v0.8b, v0.8b",
        "ldaxr w0, [x1]",
        "paciasp",
        "bti c",
        "mrs x0, tpidr_el0",
        "mrs x0, ctr_el0",
        "dc zva, x0",
        "1: b.ne 1b",
        "tbz w0, #3, f",
        "adrp x0, f",
        "ldr x0, f",
        "bl f",
        "udf #0",
    ],
}


def tools(machine: str) -> str:
    """The C++ compiler for a machine; skips the test, naming the package, when it or its binutils are missing."""
    own = platform.machine() == machine
    compilers = ["g++", "clang++"] if own else [f"{machine}-linux-gnu-g++"]
    compiler = next((path for name in compilers if (path := shutil.which(name))), None)
    if compiler is None:
        pytest.skip(f"needs a C++ compiler for {machine}; apt-get install {'g++' if own else 'g++-aarch64-linux-gnu'}")
    try:
        check_isa.binutils(machine, "objdump")
        check_isa.binutils(machine, "as")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return compiler


def compile_to(build: Path, machine: str, target: str, source: str, *flags: str, name: str = "a.cpp") -> Path:
    """Compiles ``source`` as CMake would for a target of the build folder; the object's path."""
    compiler = tools(machine)
    place = build / "CMakeFiles" / f"{target}.dir"
    place.mkdir(parents=True, exist_ok=True)
    (build / name).write_text(source)
    path = place / f"{name}.o"
    subprocess.run(
        [compiler, "-O2", "-fPIC", MARCH[machine], *flags, "-c", build / name, "-o", path], check=True, cwd=build
    )
    return path


def assemble(build: Path, machine: str, instructions: list[str]) -> dict[str, str]:
    """An object of the target neoserve_native with one function f0, f1, ... for each instruction: name -> instruction.

    Instructions that this assembler does not know are left out.
    """
    tools(machine)
    place = build / "CMakeFiles" / "neoserve_native.dir"
    place.mkdir(parents=True)
    command = [check_isa.binutils(machine, "as"), f"-march={ALL[machine]}", "-o", place / "a.o", "-"]
    functions = {f"f{i}": text for i, text in enumerate(instructions)}
    for _ in range(2):
        text = ".text\nf: nop\n" + "".join(f"{name}: {text}\n" for name, text in functions.items())
        result = subprocess.run(command, input=text, capture_output=True, text=True)
        unknown = {int(n) - 3 for n in re.findall(r"\{standard input\}:(\d+): Error", result.stderr)}
        if not unknown:
            assert result.returncode == 0, result.stderr
            return functions
        functions = {name: text for i, (name, text) in enumerate(functions.items()) if i not in unknown}
    raise AssertionError(result.stderr)


ALL = {
    "x86_64": "generic64+avx512f+avx512bw+avx512vl+avx512_vnni+avx_vnni+avx512_bf16+avx512_fp16+f16c+fma+bmi+bmi2+lzcnt"
    "+movbe+adx+aes+pclmul+sha+gfni+rdrnd+rdseed+rdtscp+fsgsbase+xsave+clwb+movdiri+xop+amx_tile+amx_int8+sse4.2+cx16"
    "+popcnt+ibt+nop+cmov+fxsr",
    "aarch64": "armv8.6-a+sve2+sme+crypto+sha3+fp16+fp16fml+rng+memtag+sb",
}


@pytest.mark.parametrize("machine", list(FOREIGN))
class TestInstructions:
    def test_foreign(self, tmp_path: Path, machine: str) -> None:
        functions = assemble(tmp_path, machine, FOREIGN[machine])
        assert len(functions) >= len(FOREIGN[machine]) - 3
        offences, checked = check_isa.check_build(tmp_path)
        assert checked == 1
        caught = {offence.split(": ")[1] for offence in offences}
        assert {text for name, text in functions.items() if name not in caught} == set()

    def test_baseline(self, tmp_path: Path, machine: str) -> None:
        assert len(assemble(tmp_path, machine, BASELINE[machine])) == len(BASELINE[machine])
        assert check_isa.check_build(tmp_path) == ([], 1)

    def test_unknown_feature_set_is_an_error(self, machine: str) -> None:
        tools(machine)
        with pytest.raises(ValueError, match="march"):
            check_isa.refused(machine, "no-such-architecture", ["nop"])


# Planted in C++ as they would come about by accident or by haste.
LEAKS = {
    "x86_64": {
        "avx2": 'void f(float* p) { asm volatile("vpaddd %%ymm0, %%ymm1, %%ymm2" ::: "xmm2"); }',
        "avx512": 'void f() { asm volatile("vaddps %%zmm0, %%zmm1, %%zmm2" ::: "xmm2"); }',
        "bmi2": '__attribute__((target("bmi2"))) unsigned long f(unsigned long a, int n) { return a << n; }',
        "clones": '__attribute__((target_clones("avx2", "default"))) '
        "void f(float* p) { for (int i = 0; i < 99; i++) p[i] += 1; }",
        "initialiser": '__attribute__((target("bmi2"))) static long g(long a, int n) { return a << n; }\n'
        "volatile int two = 2;\nlong value = g(two, two);",
        "constructor": '__attribute__((constructor, target("avx2"))) void f() { asm volatile("vzeroupper"); }',
        "section": '__attribute__((section(".quiet"), target("avx"))) void f() { asm volatile("vzeroall"); }',
    },
    "aarch64": {
        "sve": '__attribute__((target("+sve"))) void f() { asm volatile("ptrue p0.b"); }',
        "i8mm": '__attribute__((target("arch=armv8.2-a+i8mm"))) '
        'void f() { asm volatile("smmla v0.4s, v1.16b, v2.16b" ::: "v0"); }',
        "dotprod": '__attribute__((target("arch=armv8.2-a+dotprod"))) '
        'void f() { asm volatile("sdot v0.4s, v1.16b, v2.16b" ::: "v0"); }',
        "bf16": '__attribute__((target("arch=armv8.2-a+bf16"))) '
        'void f() { asm volatile("bfdot v0.4s, v1.8h, v2.8h" ::: "v0"); }',
        "lse": '__attribute__((target("arch=armv8.1-a"))) int f(int* p) { return __atomic_fetch_add(p, 1, 5); }',
        "initialiser": "volatile int two = 2;\n"
        '__attribute__((target("+crc"))) static int g(int a) { int b; '
        'asm("crc32w %w0, %w1, %w1" : "=r"(b) : "r"(a)); return b; }\n'
        "int value = g(two);",
    },
}


class TestObjects:
    @pytest.mark.parametrize(("machine", "leak"), [(m, name) for m in LEAKS for name in LEAKS[m]])
    def test_leak(self, tmp_path: Path, machine: str, leak: str) -> None:
        # Atomics inline, so that a function with LSE in its target uses it.
        flags = ["-mno-outline-atomics"] if machine == "aarch64" else []
        compile_to(tmp_path, machine, "neoserve_native", LEAKS[machine][leak], *flags)
        offences, checked = check_isa.check_build(tmp_path)
        assert checked == 1
        assert any("above the baseline" in offence for offence in offences)

    @pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
    def test_flags_of_a_kernel_on_a_baseline_object(self, tmp_path: Path, machine: str) -> None:
        source = "void f(float* p) { for (int i = 0; i < 64; i++) p[i] += 1; }"
        compile_to(
            tmp_path,
            machine,
            "nanobind-static",
            source,
            "-O3",
            "-mavx2" if machine == "x86_64" else "-march=armv8-a+sve",
        )
        assert check_isa.check_build(tmp_path)[0]

    @pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
    def test_clean(self, tmp_path: Path, machine: str) -> None:
        source = (
            "#include <atomic>\n#include <cmath>\n#include <string>\n#include <vector>\nstd::atomic<long> n;\n"
            "std::string name(int i) { n += i; return std::to_string(i); }\n"
            "std::vector<double> values{std::sin(1.0), 2};\n"
            "int choose(int i) { switch (i) { case 1: return 5; case 2: return 9; case 3: return 4; case 7: return 2;\n"
            "case 8: return 11; case 9: return -1; } return 0; }\n"
        )
        compile_to(tmp_path, machine, "neoserve_native", source)
        assert check_isa.check_build(tmp_path) == ([], 1)

    def test_xgetbv_is_allowed_where_cpuid_was_asked(self, tmp_path: Path) -> None:
        source = 'unsigned f() { unsigned a, d; asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0)); return a; }'
        (tmp_path / "native/core").mkdir(parents=True)
        (tmp_path / "CMakeFiles/neoserve_native.dir/native/core").mkdir(parents=True)
        compile_to(tmp_path, "x86_64", "neoserve_native", source, name="native/core/features.cpp")
        assert check_isa.check_build(tmp_path) == ([], 1)
        (tmp_path / "CMakeFiles/neoserve_native.dir/native/core/features.cpp.o").rename(
            tmp_path / "CMakeFiles/neoserve_native.dir/model.cpp.o"
        )
        assert check_isa.check_build(tmp_path)[0]

    def test_outline_atomics_may_use_lse(self) -> None:
        listing = check_isa.Listing("aarch64")
        tools("aarch64")
        listing.add(check_isa.Place("a.o", "__aarch64_ldadd4_acq_rel", "armv8-a"), "ldaddal w0, w1, [x2]")
        assert listing.offences() == []
        listing.add(check_isa.Place("a.o", "__aarch64_leak", "armv8-a"), "ldaddal w0, w1, [x2]")
        assert len(listing.offences()) == 1

    def test_llvm_sees_it_too(self, tmp_path: Path) -> None:
        if check_isa.llvm_objdump() is None:
            pytest.skip("needs llvm-objdump; apt-get install llvm")
        path = compile_to(tmp_path, "aarch64", "neoserve_native", LEAKS["aarch64"]["i8mm"])
        assert any("llvm-objdump" in offence for offence in check_isa.check_by_llvm(path, None))


class TestKernels:
    def test_weak_symbol_and_initialiser(self, tmp_path: Path) -> None:
        source = "inline int g(int a) { return a * 3; }\nint (*table)(int) = g;\nint h(); int value = h();\n"
        compile_to(tmp_path, "x86_64", "neoserve_kernels_avx2", source)
        offences, _ = check_isa.check_build(tmp_path)
        assert any("weak symbol _Z1gi" in offence for offence in offences)
        assert any("static initialiser" in offence for offence in offences)

    def test_resolver(self, tmp_path: Path) -> None:
        source = 'static int g() { return 1; }\nextern "C" { int (*pick())() { return g; } }\n'
        source += 'int f() __attribute__((ifunc("pick")));\n'
        compile_to(tmp_path, "x86_64", "neoserve_kernels_avx2", source)
        offences, _ = check_isa.check_build(tmp_path)
        assert any("resolver" in offence for offence in offences)

    def test_leaf(self, tmp_path: Path) -> None:
        source = "static int g(int a) { return a; }\nint f(int a) { return g(a); }"
        compile_to(tmp_path, "x86_64", "neoserve_kernels_avx2", source, "-mavx2")
        assert check_isa.check_build(tmp_path) == ([], 1)

    def test_above_the_own_folder(self, tmp_path: Path) -> None:
        source = LEAKS["x86_64"]["avx512"]
        compile_to(tmp_path, "x86_64", "neoserve_kernels_avx512", source)
        assert check_isa.check_build(tmp_path) == ([], 1)
        compile_to(tmp_path, "x86_64", "neoserve_kernels_avx2", source)
        offences, _ = check_isa.check_build(tmp_path)
        assert len(offences) == 1
        assert "neoserve_kernels_avx2" in offences[0]

    def test_unknown_folder(self, tmp_path: Path) -> None:
        compile_to(tmp_path, "x86_64", "neoserve_kernels_novel", "int f() { return 1; }")
        with pytest.raises(ValueError, match="novel has no entry in KERNEL_FEATURES"):
            check_isa.check_build(tmp_path)


# A kernel that may use its own instructions, and baseline code that must not.
KERNEL = {
    "x86_64": ("avx2", 'extern "C" void kernel() { asm volatile("vpaddd %%ymm0, %%ymm1, %%ymm2" ::: "xmm2"); }'),
    "aarch64": ("i8mm", 'extern "C" ' + LEAKS["aarch64"]["i8mm"].replace("f()", "kernel()")),
}


class TestLinked:
    def link(self, build: Path, machine: str, archived: str, *flags: str) -> tuple[list[str], int]:
        """Links a kernel, baseline code and an archive with ``archived``; the offences of the extension."""
        folder, kernel = KERNEL[machine]
        objects = [
            compile_to(build, machine, f"neoserve_kernels_{folder}", kernel),
            compile_to(
                build,
                machine,
                "neoserve_native",
                'extern "C" int member();\nint call() { return member(); }',
                name="b.cpp",
            ),
        ]
        member = compile_to(build, machine, "other", archived, name="c.cpp")
        archive = build / "libother.a"
        subprocess.run([check_isa.binutils(machine, "ar"), "rc", archive, member], check=True)
        command = [tools(machine), "-shared", "-o", "_native.so", "-s", "-Wl,-Map=_native.map", *flags]
        shown = [path.relative_to(build) for path in objects]
        subprocess.run([*command, *shown, archive], check=True, cwd=build)
        offences, checked = check_isa.check_build(build)
        assert checked == 3
        return offences, checked

    @pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
    def test_archive_member(self, tmp_path: Path, machine: str) -> None:
        clean = 'extern "C" int member() { return 1; }'
        leak = (
            LEAKS[machine]["avx512" if machine == "x86_64" else "sve"] + '\nextern "C" int member() { f(); return 1; }'
        )
        (tmp_path / "clean").mkdir()
        assert self.link(tmp_path / "clean", machine, clean)[0] == []
        (tmp_path / "leak").mkdir()
        offences, _ = self.link(tmp_path / "leak", machine, leak)
        assert offences
        assert all("libother.a(c.cpp.o)" in offence for offence in offences)

    def test_map_of_lld(self, tmp_path: Path) -> None:
        lld = next((name for name in ("ld.lld", *(f"ld.lld-{n}" for n in range(16, 31))) if shutil.which(name)), None)
        if lld is None or shutil.which("g++") is None:
            pytest.skip("needs g++ and lld; apt-get install g++ lld")
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "ld.lld").symlink_to(str(shutil.which(lld)))
        flags = ["-fuse-ld=lld", f"-B{tmp_path / 'bin'}"]
        (tmp_path / "clean").mkdir()
        assert self.link(tmp_path / "clean", "x86_64", 'extern "C" int member() { return 1; }', *flags)[0] == []
        leak = LEAKS["x86_64"]["avx512"].replace("void f()", 'extern "C" int member()').replace("; }", "; return 1; }")
        (tmp_path / "leak").mkdir()
        offences, _ = self.link(tmp_path / "leak", "x86_64", leak, *flags)
        assert any("libother.a(c.cpp.o)" in offence for offence in offences)

    def test_outline_atomics_of_libgcc(self, tmp_path: Path) -> None:
        source = 'extern "C" int member() { static int n; return __atomic_fetch_add(&n, 1, 5); }'
        offences, _ = self.link(tmp_path, "aarch64", source, "-moutline-atomics")
        assert offences == []

    def test_no_map(self, tmp_path: Path) -> None:
        self.link(tmp_path, "x86_64", 'extern "C" int member() { return 1; }')
        (tmp_path / "_native.map").unlink()
        assert any("no linker map" in offence for offence in check_isa.check_build(tmp_path)[0])

    def test_a_map_that_names_nothing_allows_nothing(self, tmp_path: Path) -> None:
        self.link(tmp_path, "x86_64", 'extern "C" int member() { return 1; }')
        (tmp_path / "_native.map").write_text("")
        assert any("above the baseline" in offence for offence in check_isa.check_build(tmp_path)[0])


class TestFolder:
    def test_nothing_built_is_an_offence(self, tmp_path: Path) -> None:
        offences, checked = check_isa.check_build(tmp_path)
        assert checked == 0
        assert len(offences) == 1

    def test_not_an_object(self, tmp_path: Path) -> None:
        path = tmp_path / "a.o"
        path.write_bytes(b"")
        with pytest.raises(ValueError, match="not an ELF object"):
            check_isa.machine_of(path)

    def test_command(self, tmp_path: Path) -> None:
        result = subprocess.run([sys.executable, TOOLS / "check_isa.py", tmp_path], capture_output=True, text=True)
        assert result.returncode == 1
        assert "0 files checked, 1 offences" in result.stdout
