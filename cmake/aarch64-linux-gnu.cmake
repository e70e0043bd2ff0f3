# Toolchain file: AArch64 Linux with Debian's cross compiler, for an unpacked AArch64 Python.
#   -DNEOSERVE_TARGET_PYTHON_INCLUDE=ROOT/usr/include/python3.11   headers of the target's Python
#   -DNEOSERVE_TARGET_SUFFIX=.cpython-311-aarch64-linux-gnu.so     file name ending of its extensions
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
if(NOT CMAKE_CXX_COMPILER)
  set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
endif()
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES NEOSERVE_TARGET_PYTHON_INCLUDE NEOSERVE_TARGET_SUFFIX)
set(Python_INCLUDE_DIR "${NEOSERVE_TARGET_PYTHON_INCLUDE}")
set(NB_SUFFIX "${NEOSERVE_TARGET_SUFFIX}")
# Debian's pyconfig.h includes another one by a path below /usr/include.
set(CMAKE_CXX_FLAGS_INIT "-idirafter ${NEOSERVE_TARGET_PYTHON_INCLUDE}/..")
