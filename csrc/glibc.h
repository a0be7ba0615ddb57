/* The versions of glibc's functions that the extension asks for: the oldest, so that one built on a new system loads on
 * an old one too. glibc 2.34 gave these a new version when it moved them into libc; they are what they were.
 *
 * Included before everything else, by an option of the compiler (setup.py). It includes nothing itself: a header of the
 * system, read before Python's, would settle what the system's headers declare.
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
