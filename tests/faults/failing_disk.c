/* A disk that fails: preloaded, a third of the steps that change something below FAILING_FOLDER end with EIO while FAILING_WHILE exists.

   Steps are: to open a file for writing, to rename, to link, to sync. Which of them fail is drawn by chance, by the process's id and
   its count of steps. What lies below FAILING_EXCEPT, where that is set, never fails. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static atomic_uint count;

static int is_below(const char *path, const char *folder) {
    size_t length = folder ? strlen(folder) : 0;
    return length && path && strncmp(path, folder, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static int one_in_three(void) {
    uint64_t x = ((uint64_t)getpid() << 32) + atomic_fetch_add(&count, 1) + 1;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (x ^ (x >> 31)) % 3 == 0;
}

static int fails(const char *path) {
    const char *file = getenv("FAILING_WHILE");
    int kept = errno;
    int on = file && is_below(path, getenv("FAILING_FOLDER")) && !is_below(path, getenv("FAILING_EXCEPT")) && access(file, F_OK) == 0;
    errno = kept;
    if (!on || !one_in_three()) return 0;
    errno = EIO;
    return 1;
}

static const char *name_of(int handle, char *into) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t size = readlink(link, into, PATH_MAX - 1);
    into[size > 0 ? size : 0] = 0;
    return into;
}

#define NEXT(type, name) ((type)dlsym(RTLD_NEXT, name))

int rename(const char *from, const char *to) {
    if (fails(to)) return -1;
    return NEXT(int (*)(const char *, const char *), "rename")(from, to);
}

int link(const char *from, const char *to) {
    if (fails(to)) return -1;
    return NEXT(int (*)(const char *, const char *), "link")(from, to);
}

int fsync(int handle) {
    char path[PATH_MAX];
    if (fails(name_of(handle, path))) return -1;
    return NEXT(int (*)(int), "fsync")(handle);
}

static int open_with(const char *symbol, const char *path, int flags, mode_t mode) {
    if ((flags & (O_WRONLY | O_RDWR | O_CREAT)) && fails(path)) return -1;
    return NEXT(int (*)(const char *, int, ...), symbol)(path, flags, mode);
}

static int takes_a_mode(int flags) { return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE; }

int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = takes_a_mode(flags) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return open_with("open", path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = takes_a_mode(flags) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return open_with("open64", path, flags, mode);
}

static FILE *fopen_with(const char *symbol, const char *path, const char *mode) {
    if (strpbrk(mode, "wa+") && fails(path)) return NULL;
    return NEXT(FILE *(*)(const char *, const char *), symbol)(path, mode);
}

FILE *fopen(const char *path, const char *mode) { return fopen_with("fopen", path, mode); }

FILE *fopen64(const char *path, const char *mode) { return fopen_with("fopen64", path, mode); }
