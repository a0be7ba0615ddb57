/* Selects the oldest versions of glibc functions, so that an extension built on a new system loads on an old one too.
 * glibc 2.34 gave these functions a new version when it moved them into libc, without changing them.
 *
 * Included before everything else by a compiler option (setup.py). It includes nothing itself: a system header read
 * before Python.h would fix the feature macros.
 */
#if __has_include(<gnu/libc-version.h>) && defined(__x86_64__)
#define OLDEST_GLIBC "GLIBC_2.2.5"
#elif __has_include(<gnu/libc-version.h>) && defined(__aarch64__)
#define OLDEST_GLIBC "GLIBC_2.17"
#endif

#ifdef OLDEST_GLIBC
__asm__(".symver dlerror,dlerror@" OLDEST_GLIBC);
__asm__(".symver dlopen,dlopen@" OLDEST_GLIBC);
__asm__(".symver dlsym,dlsym@" OLDEST_GLIBC);
__asm__(".symver pthread_once,pthread_once@" OLDEST_GLIBC);
#endif
