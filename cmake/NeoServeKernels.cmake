# Kernel folders: native/kernels/<arch>/<feature set>/*.cpp, compiled with the folder's own flags.

set(NEOSERVE_KERNEL_TARGETS "")
set(NEOSERVE_KERNEL_FOLDERS "")

# neoserve_kernels(<feature set> <flags>...): the folder becomes an object library; without sources it is skipped.
# Leaf code only: no exceptions, no run-time type information, no thread-safe statics.
macro(neoserve_kernels feature_set)
  file(GLOB sources CONFIGURE_DEPENDS "native/kernels/${NEOSERVE_ARCH}/${feature_set}/*.cpp")
  if(sources)
    set(target "neoserve_kernels_${feature_set}")
    add_library(${target} OBJECT ${sources})
    neoserve_target_flags(${target})
    target_compile_options(${target} PRIVATE ${ARGN} -fno-exceptions -fno-rtti -fno-threadsafe-statics)
    list(APPEND NEOSERVE_KERNEL_TARGETS ${target})
    list(APPEND NEOSERVE_KERNEL_FOLDERS ${feature_set})
  endif()
endmacro()

# Writes generated/kernel_folders.inc: one line NEOSERVE_KERNEL_FOLDER(<feature set>) per folder that was built, in
# the order of the calls, for the table of rows to expand: a later folder is preferred to an earlier one. It is
# rewritten only when it changes.
function(neoserve_write_kernel_list)
  set(text "// Written by CMake: the kernel folders in this build.\n")
  foreach(feature_set IN LISTS NEOSERVE_KERNEL_FOLDERS)
    string(APPEND text "NEOSERVE_KERNEL_FOLDER(${feature_set})\n")
  endforeach()
  set(path "${PROJECT_BINARY_DIR}/generated/kernel_folders.inc")
  set(before "")
  if(EXISTS "${path}")
    file(READ "${path}" before)
  endif()
  if(NOT before STREQUAL text)
    file(WRITE "${path}" "${text}")
  endif()
  if(NEOSERVE_KERNEL_FOLDERS)
    string(JOIN ", " shown ${NEOSERVE_KERNEL_FOLDERS})
  else()
    set(shown "none")
  endif()
  message(STATUS "NeoServe: ${NEOSERVE_ARCH}, kernel folders: ${shown}")
endfunction()
