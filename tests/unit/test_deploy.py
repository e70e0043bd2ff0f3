"""What must hold of the Dockerfile, the files for deployment and the hosted workflows, none of which runs in a test."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "Dockerfile").exists():
    pytest.skip("not a checkout: the container's files are not there", allow_module_level=True)
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED_ACTION = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)*")


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def instructions(text: str) -> list[list[tuple[str, str]]]:
    """(name, arguments) of each instruction, in one list per stage; the first holds what stands before any FROM."""
    stages: list[list[tuple[str, str]]] = [[]]
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    for line in filter(str.strip, joined.splitlines()):
        name, _, arguments = line.strip().partition(" ")
        if name == "FROM":
            stages.append([])
        stages[-1].append((name, " ".join(arguments.split())))
    return stages


def values(stage: list[tuple[str, str]], name: str) -> list[str]:
    return [arguments for found, arguments in stage if found == name]


STAGES = instructions(DOCKERFILE)
RUN_STAGE = STAGES[-1]


class TestDockerfile:
    def test_the_user_is_a_number_and_not_root(self) -> None:
        """Kubernetes can prove runAsNonRoot for a number alone; group 0 is what OpenShift gives to any user."""
        (user,) = values(RUN_STAGE, "USER")
        uid, _, gid = user.partition(":")
        assert int(uid) > 0
        assert gid == "0"
        assert f"--uid {uid}" in " ".join(values(RUN_STAGE, "RUN"))
        assert [name for name, _ in RUN_STAGE].index("USER") > max(
            i for i, (name, _) in enumerate(RUN_STAGE) if name == "RUN"
        )

    @pytest.mark.parametrize("name", ["ENTRYPOINT", "CMD"])
    def test_the_server_is_started_without_a_shell(self, name: str) -> None:
        """A shell as the first process would keep SIGTERM to itself."""
        (value,) = values(RUN_STAGE, name)
        command = json.loads(value)
        assert all(isinstance(word, str) for word in command)
        assert not {"sh", "bash", "/bin/sh", "-c"} & set(command)

    def test_the_entry_point_is_understood_by_the_server(self) -> None:
        from typer.testing import CliRunner

        from neoserve.cli import main

        command = json.loads(values(RUN_STAGE, "ENTRYPOINT")[0])
        assert Path(command[0]).name == "neoserve"
        result = CliRunner().invoke(main.app, [*command[1:], "--help"])
        assert result.exit_code == 0, result.output
        assert command[command.index("--host") + 1] == "0.0.0.0"
        assert command[command.index("--port") + 1] == values(RUN_STAGE, "EXPOSE")[0]

    def test_stop_signal_and_volume(self) -> None:
        assert values(RUN_STAGE, "STOPSIGNAL") == ["SIGTERM"]
        (volume,) = values(RUN_STAGE, "VOLUME")
        (folder,) = json.loads(volume)
        environment = " ".join(values(RUN_STAGE, "ENV"))
        assert f"XDG_CACHE_HOME={folder} " in environment
        assert f"HF_HOME={folder}/" in environment

    def test_the_health_check_is_the_liveness_route_asked_by_python(self) -> None:
        (check,) = values(RUN_STAGE, "HEALTHCHECK")
        command = json.loads(check[check.index("CMD ") + 4 :])
        assert command[0].endswith("/python")
        assert command[-1].endswith("/healthcheck.py")
        assert load("deploy/healthcheck.py").DEFAULT_URL == "http://127.0.0.1:8000/health/live"

    def test_the_run_stage_has_no_compiler_and_no_package_lists(self) -> None:
        commands = " ".join(values(RUN_STAGE, "RUN"))
        assert "pip" not in commands
        for package in ("g++", "gcc", "build-essential", "-dev", "curl", "git", "make"):
            assert not re.search(rf"(?<![\w]){re.escape(package)}(?!\w)", commands), package
        assert "rm -rf /var/lib/apt/lists/*" in commands
        assert values(RUN_STAGE, "COPY") == ["--from=build /opt/neoserve /opt/neoserve"]

    def test_nothing_is_fetched_but_packages_and_no_secret_is_taken(self) -> None:
        for stage in STAGES:
            assert values(stage, "ADD") == []
            assert not any(re.search(r"https?://|git clone|wget|curl ", text) for text in values(stage, "RUN"))
            for text in [*values(stage, "ARG"), *values(stage, "ENV")]:
                assert not re.search(r"TOKEN|PASSWORD|SECRET|API_KEY|INDEX_URL", text)

    def test_bases_are_named_once_with_a_tag_that_is_not_latest(self) -> None:
        (base,) = [text.partition("=")[2] for text in values(STAGES[0], "ARG") if text.startswith("BASE=")]
        assert re.fullmatch(r"debian:\d+(\.\d+)?-slim(@sha256:[0-9a-f]{64})?", base)
        assert {values(stage, "FROM")[0].split(" AS ")[0] for stage in STAGES[1:]} == {"scratch", "${BASE}"}

    def test_labels(self) -> None:
        labels = " ".join(values(RUN_STAGE, "LABEL"))
        for key in ("title", "description", "licenses", "version", "revision", "base.name"):
            assert f"org.opencontainers.image.{key}=" in labels

    def test_what_is_copied_exists_and_gets_past_dockerignore(self) -> None:
        allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        assert allowed[1] == "*"
        copied = [word for text in values(STAGES[1], "COPY") for word in text.split()[:-1]]
        assert copied
        for name in copied:
            assert (ROOT / name).exists(), name
            assert f"!{name}" in allowed
        assert {line[1:] for line in allowed if line.startswith("!")} == set(copied)


class TestPinnedPackages:
    def test_every_dependency_is_pinned_within_its_bounds_and_hashed(self) -> None:
        packaging = pytest.importorskip("packaging.requirements")
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        for file, start in (("requirements.txt", "dependencies = ["), ("build-requirements.txt", "requires = [")):
            text = (ROOT / "deploy" / file).read_text(encoding="utf-8")
            pins = dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))
            wanted = re.findall(r'"([^"]+)"', project.split("\n" + start, 1)[1].split("]", 1)[0])
            assert wanted
            for line in wanted:
                requirement = packaging.Requirement(line)
                name = requirement.name.lower().replace("_", "-")
                assert name in pins, f"{name} is not in deploy/{file}: run tools/containers/lock.sh"
                assert pins[name] in requirement.specifier, f"deploy/{file} has {name} {pins[name]}, not {line}"
            assert all("--hash=sha256:" in block for block in re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:])


class Handler(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health/live" else 404)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[http.server.HTTPServer]:
    with http.server.HTTPServer(("127.0.0.1", 0), type("One", (Handler,), {})) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class TestHealthCheck:
    def run(self, url: str) -> subprocess.CompletedProcess[str]:
        # A proxy that is set for the model's download must not be asked for the server's health.
        environment = {"PATH": os.environ["PATH"], "NEOSERVE_HEALTH_URL": url, "http_proxy": "http://127.0.0.1:9"}
        command = [sys.executable, "-IS", ROOT / "deploy" / "healthcheck.py"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    @pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (404, 1)])
    def test_exit_code(self, server: http.server.HTTPServer, status: int, code: int) -> None:
        server.RequestHandlerClass.status = status  # type: ignore[attr-defined]
        result = self.run(f"http://127.0.0.1:{server.server_port}/health/live")
        assert result.returncode == code
        assert result.stderr == ""
        assert (str(status) in result.stdout) == (code == 1)

    @pytest.mark.parametrize("url", ["http://127.0.0.1:1/health/live", "https://127.0.0.1/", "nonsense", "http://[x"])
    def test_what_does_not_answer_is_unhealthy_with_the_reason(self, url: str) -> None:
        result = self.run(url)
        assert result.returncode == 1
        assert result.stderr == ""
        assert f"NEOSERVE_HEALTH_URL {url}: " in result.stdout


class TestWorkflows:
    def test_they_are_there(self) -> None:
        assert [path.name for path in WORKFLOWS] == ["ci.yml", "native.yml", "release.yml"]

    @pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
    def test_actions_are_pinned_by_commit(self, path: Path) -> None:
        used = re.findall(r"^\s*(?:- )?uses: (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert used
        for action in used:
            if action.startswith("./"):
                assert (ROOT / action).is_file(), action
            else:
                assert PINNED_ACTION.fullmatch(action), action

    @pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
    def test_every_file_and_make_target_named_exists(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        names = set(re.findall(r"(?<![\w./-])((?:tools|tests|docs|deploy|\.ci|\.github)/[\w./-]*[\w])", text))
        assert names
        for name in names:
            assert (ROOT / name).exists(), name
            if name.endswith(".sh") or name == ".ci/run":
                assert os.access(ROOT / name, os.X_OK), name
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
        assert set(re.findall(r"\bmake ([\w-]+)$", text, re.MULTILINE)) <= targets

    @pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
    def test_jobs_have_time_limits_and_no_write_permission_by_default(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        assert text.count("runs-on:") == text.count("timeout-minutes:")
        head, _, _ = text.partition("\njobs:\n")
        assert "permissions: {}" in head or head.rstrip().endswith("contents: read") or "contents: read\n" in head
        assert "write" not in head
        assert "secrets." not in text
        assert "pull_request_target" not in text

    def test_the_gate_needs_every_other_job(self) -> None:
        text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
        jobs = re.findall(r"^  ([\w-]+):$", text.split("\njobs:\n", 1)[1], re.MULTILINE)
        needs = re.search(r"^  gate:\n    needs: \[(.*)\]$", text, re.MULTILINE)
        assert needs is not None
        assert needs[1].split(", ") == [job for job in jobs if job != "gate"]

    def test_the_gate_passes_and_fails_when_it_should(self, tmp_path: Path) -> None:
        text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
        script = tmp_path / "gate.sh"
        script.write_text(text.split("        run: |\n")[-1])
        for code, results, passes in (
            ("true", "success success", True),
            ("false", "success skipped", True),
            ("true", "success skipped", False),
            ("true", "success failure", False),
            ("false", "cancelled", False),
            ("", "failure skipped", False),
        ):
            environment = os.environ | {"CODE": code, "RESULTS": results}
            done = subprocess.run(["bash", "-e", script], env=environment, capture_output=True)
            assert (done.returncode == 0) == passes, (code, results)

    def test_released_pythons_are_those_of_the_classifiers(self) -> None:
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        classified = re.findall(r"Programming Language :: Python :: 3\.(\d+)", project)
        build = re.search(r'^build = "(.*)"$', project, re.MULTILINE)
        assert build is not None
        assert re.findall(r"cp3(\d+)-manylinux_\*", build[1]) == classified
        assert len(build[1].split()) == len(classified)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
class TestChanges:
    @pytest.mark.parametrize(
        ("files", "code"),
        [
            (["docs/tour.md"], "false"),
            (["README.zh.md", "docs/ops.md"], "false"),
            (["README.md"], "true"),
            (["LICENSE"], "true"),
            (["python/neoserve/cli/serve.py"], "true"),
            (["docs/tour.md", "Dockerfile"], "true"),
            (["docs/new.py"], "true"),
            ([".github/workflows/ci.yml"], "true"),
        ],
    )
    def test_what_counts(self, tmp_path: Path, files: list[str], code: str) -> None:
        def git(*arguments: str) -> str:
            options = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false"]
            return subprocess.check_output(["git", *options, *arguments], cwd=tmp_path, text=True).strip()

        git("init", "--quiet")
        git("commit", "--quiet", "--allow-empty", "--message", "base")
        base = git("rev-parse", "HEAD")
        for name in files:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("x")
        git("add", ".")
        git("commit", "--quiet", "--message", "change")
        script = ROOT / ".github" / "scripts" / "changes.sh"
        for start, wanted in ((base, code), ("0" * 40, "true")):
            printed = subprocess.check_output([script, start, "HEAD"], cwd=tmp_path, text=True)
            assert printed == f"code={wanted}\n"


class TestExpectedRows:
    expected = load(".github/scripts/expected_rows.py")
    classes = load("tests/arm/test_cpu_classes.py")
    FLAGS = {  # noqa: RUF012
        "neon": "asimd", "fp16": "asimdhp", "dotprod": "asimddp", "sve_i8mm": "svei8mm", "sve_bf16": "svebf16",
    }  # fmt: skip

    @pytest.mark.parametrize("cpu", sorted(classes.FEATURES))
    def test_it_expects_what_the_emulated_lane_finds(self, cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rows that come to the AArch64 lane must come to the hosted runners' expectation too."""
        flags = {self.FLAGS.get(name, name) for name in self.classes.FEATURES[cpu]}
        features, rows = self.expected.expectation("aarch64", flags)
        assert features == self.classes.FEATURES[cpu]
        monkeypatch.setattr(self.classes, "CPU", cpu)
        ops = (*self.expected.INTEGER_ROWS, "linear_bf16")
        wanted = [f"{op}_{self.classes.expected_folder(op)}" for op in ops]
        assert rows == [row for row in wanted if not row.endswith("_neon")]

    def test_it_agrees_with_this_machine(self) -> None:
        from neoserve import _native

        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        machine = os.uname().machine
        features, rows = self.expected.expectation(machine, self.expected.cpu_flags(text))
        assert set(features) == set(_native.cpu_features())
        assert set(rows) <= {row for _, row, _, chosen, _ in _native.rows() if chosen}

    def test_a_machine_without_rows_above_the_baseline_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(self.expected.platform, "machine", lambda: "aarch64")
        info = tmp_path / "cpuinfo"
        info.write_text("processor\t: 0\nFeatures\t: fp asimd evtstrm aes\n")
        assert self.expected.main([str(info)]) == 1
        assert "no row above the baseline" in capsys.readouterr().err
        info.write_text("processor\t: 0\nFeatures\t: fp asimd asimdhp asimddp\n")
        assert self.expected.main([str(info)]) == 0
        assert "NEOSERVE_EXPECT_ROWS=linear_int8_channel_dotprod," in capsys.readouterr().out
