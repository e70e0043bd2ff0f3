# Compiler, language and baseline flags. Sets NEOSERVE_ARCH (x86_64 or aarch64) and
# neoserve_target_flags(target).

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(oldest 11)
elseif(CMAKE_CXX_COMPILER_ID MATCHES "^(Clang|AppleClang)$")
  set(oldest 16)
else()
  message(FATAL_ERROR "C++ compiler ${CMAKE_CXX_COMPILER} is ${CMAKE_CXX_COMPILER_ID}; NeoServe needs "
                      "g++ 11 or clang++ 16, or newer (choose one by CXX=...)")
endif()
if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS oldest)
  message(FATAL_ERROR "C++ compiler ${CMAKE_CXX_COMPILER} is ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}; "
                      "NeoServe needs version ${oldest} or newer (choose one by CXX=...)")
endif()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(NEOSERVE_ARCH x86_64)
  set(NEOSERVE_BASELINE -march=x86-64-v2)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(NEOSERVE_ARCH aarch64)
  # Outline atomics use LSE where the CPU has it, behind a run-time check.
  set(NEOSERVE_BASELINE -march=armv8-a -moutline-atomics)
else()
  message(FATAL_ERROR "processor ${CMAKE_SYSTEM_PROCESSOR} is not supported; NeoServe runs on x86-64 and AArch64")
endif()

# The library used stays within what libstdc++ 10 offers (no <format>, no std::atomic::wait, no <barrier>), so that
# a wheel runs on the older systems that manylinux_2_28 stands for.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

# Floating-point contraction is off everywhere: a fused multiply-add happens where the source says so and nowhere
# else, which keeps results equal over compilers and instruction sets.
add_compile_options(${NEOSERVE_BASELINE} -ffp-contract=off -fno-fast-math)
set(NEOSERVE_SANITIZE "" CACHE STRING "Build with a sanitizer: thread or address")
if(NEOSERVE_SANITIZE)
  add_compile_options(-fsanitize=${NEOSERVE_SANITIZE} -fno-omit-frame-pointer -g)
  add_link_options(-fsanitize=${NEOSERVE_SANITIZE})
endif()
option(NEOSERVE_WERROR "Treat compiler warnings as errors" OFF)

function(neoserve_target_flags target)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/native" "${PROJECT_BINARY_DIR}/generated")
  target_compile_options(${target} PRIVATE -Wall -Wextra -fvisibility=hidden -fvisibility-inlines-hidden)
  if(NEOSERVE_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()
