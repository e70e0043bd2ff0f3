# Toolchain file of the release wheels: clang and lld against an old Debian's libraries, for either architecture
# (tools/wheels/build.sh).
#   -DNEOSERVE_WHEEL_ARCH=aarch64               x86_64 or aarch64
#   -DNEOSERVE_WHEEL_CLANG=22                   version of clang, lld and llvm
#   -DNEOSERVE_WHEEL_SYSROOT=DIR                unpacked libraries; their symbol versions are the wheel's floor
#   -DNEOSERVE_TARGET_PYTHON_INCLUDE=DIR        headers of the target's Python
#   -DNEOSERVE_TARGET_SUFFIX=.abi3.so           file name ending of its extensions
foreach(name IN ITEMS NEOSERVE_WHEEL_ARCH NEOSERVE_WHEEL_CLANG NEOSERVE_WHEEL_SYSROOT NEOSERVE_TARGET_PYTHON_INCLUDE
        NEOSERVE_TARGET_SUFFIX)
  if(NOT ${name})
    message(FATAL_ERROR "${name} is not set; release wheels are built by tools/wheels/build.sh")
  endif()
  list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES ${name})
endforeach()

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR ${NEOSERVE_WHEEL_ARCH})
set(CMAKE_SYSROOT "${NEOSERVE_WHEEL_SYSROOT}")
set(CMAKE_CXX_COMPILER "clang++-${NEOSERVE_WHEEL_CLANG}")
set(CMAKE_CXX_COMPILER_TARGET "${NEOSERVE_WHEEL_ARCH}-linux-gnu")
foreach(tool IN ITEMS AR RANLIB STRIP OBJCOPY OBJDUMP NM READELF)
  string(TOLOWER ${tool} program)
  find_program(CMAKE_${tool} "llvm-${program}-${NEOSERVE_WHEEL_CLANG}" REQUIRED)
endforeach()
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(Python_INCLUDE_DIR "${NEOSERVE_TARGET_PYTHON_INCLUDE}")
set(NB_SUFFIX "${NEOSERVE_TARGET_SUFFIX}")

# The sysroot's own GCC folder by name, so that a newer one of the machine is never taken; no path of the machine in
# the wheel.
file(GLOB gcc "${NEOSERVE_WHEEL_SYSROOT}/usr/lib/gcc/${NEOSERVE_WHEEL_ARCH}-linux-gnu/*")
set(CMAKE_CXX_FLAGS_INIT "--gcc-install-dir=${gcc} -ffile-prefix-map=${CMAKE_SOURCE_DIR}=.")
string(APPEND CMAKE_CXX_FLAGS_INIT " -include \"${CMAKE_CURRENT_LIST_DIR}/glibc_2_28.h\"")
string(JOIN " " linker "-fuse-ld=lld-${NEOSERVE_WHEEL_CLANG}" -Wl,-z,relro -Wl,-z,now -Wl,-z,noexecstack
       -Wl,--build-id=sha1 -Wl,--as-needed)
set(CMAKE_SHARED_LINKER_FLAGS_INIT "${linker}")
set(CMAKE_MODULE_LINKER_FLAGS_INIT "${linker}")
set(CMAKE_EXE_LINKER_FLAGS_INIT "-fuse-ld=lld-${NEOSERVE_WHEEL_CLANG}")
