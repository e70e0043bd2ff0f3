// Included before every source of a release wheel (cmake/wheel-linux.cmake). glibc 2.29 gave these functions of the
// mathematical library a second version, which differs in the report of errors through errno alone; the first one is
// asked for, so that the wheels load from glibc 2.28 on. tools/wheels/check.py fails on a version that is missed here.
#pragma once

#if defined(__aarch64__)
#define NEOSERVE_OLDEST_GLIBC "GLIBC_2.17"
#else
#define NEOSERVE_OLDEST_GLIBC "GLIBC_2.2.5"
#endif

__asm__(".symver exp,exp@" NEOSERVE_OLDEST_GLIBC);
__asm__(".symver exp2,exp2@" NEOSERVE_OLDEST_GLIBC);
__asm__(".symver log,log@" NEOSERVE_OLDEST_GLIBC);
__asm__(".symver log2,log2@" NEOSERVE_OLDEST_GLIBC);
__asm__(".symver pow,pow@" NEOSERVE_OLDEST_GLIBC);
