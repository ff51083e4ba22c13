/* A failing disk, to preload: while FAILING_WHILE exists, a third of the changes below FAILING_FOLDER fail with EIO.

   Changes are: open a file for writing, write, truncate or sync it, copy into it within the kernel, create or remove a file or folder,
   rename, link. One write in nine is short: only half of it is written. The process id and the number of earlier changes select which
   fail. Nothing below FAILING_EXCEPT fails. Writes of libc's own streams (FILE) are not intercepted; Coldpress does not use them. */
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
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_uint count;
static const char *folder, *except, *while_exists;

static const char *kept(const char *name) {
    const char *value = getenv(name);
    return value ? strdup(value) : NULL; /* Ray overwrites the environment with process titles */
}

__attribute__((constructor)) static void begin(void) {
    folder = kept("FAILING_FOLDER");
    except = kept("FAILING_EXCEPT");
    while_exists = kept("FAILING_WHILE");
}

static int is_below(const char *path, const char *above) {
    size_t length = above ? strlen(above) : 0;
    return length && path && strncmp(path, above, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static unsigned drawn(void) {
    uint64_t x = ((uint64_t)getpid() << 32) + atomic_fetch_add(&count, 1) + 1;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (x ^ (x >> 31)) % 9;
}

enum { WELL, SHORT, FAILED };

static int how(const char *path) {
    int before = errno;
    int on = while_exists && is_below(path, folder) && !is_below(path, except) && access(while_exists, F_OK) == 0;
    errno = before;
    if (!on) return WELL;
    unsigned number = drawn();
    if (number < 3) {
        errno = EIO;
        return FAILED;
    }
    return number == 3 ? SHORT : WELL;
}

static int fails(const char *path) { return how(path) == FAILED; }

static const char *name_of(int handle, char *into) {
    char link[64];
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t size = readlink(link, into, PATH_MAX - 1);
    into[size > 0 ? size : 0] = 0;
    errno = before;
    return into;
}

static int how_by(int handle) {
    char path[PATH_MAX];
    return while_exists ? how(name_of(handle, path)) : WELL;
}

static int fails_in(int handle, const char *path) {
    char whole[2 * PATH_MAX];
    if (!while_exists) return 0;
    if (path[0] == '/' || handle == AT_FDCWD) return fails(path);
    name_of(handle, whole);
    size_t length = strlen(whole);
    snprintf(whole + length, sizeof whole - length, "/%s", path);
    return fails(whole);
}

/* The intercepted function, looked up once. */
#define NEXT(name)                                                                                                                 \
    ({                                                                                                                             \
        static typeof(&name) found;                                                                                                \
        if (!found) found = (typeof(&name))dlsym(RTLD_NEXT, #name);                                                                \
        found;                                                                                                                     \
    })

#define HIDES(name, parameters, arguments, failing)                                                                                \
    int name parameters { return failing ? -1 : NEXT(name) arguments; }

HIDES(rename, (const char *from, const char *to), (from, to), fails(to))
HIDES(link, (const char *from, const char *to), (from, to), fails(to))
HIDES(symlink, (const char *to, const char *path), (to, path), fails(path))
HIDES(mkdir, (const char *path, mode_t mode), (path, mode), fails(path))
HIDES(rmdir, (const char *path), (path), fails(path))
HIDES(unlink, (const char *path), (path), fails(path))
HIDES(renameat, (int of, const char *from, int in, const char *to), (of, from, in, to), fails_in(in, to))
HIDES(mkdirat, (int in, const char *path, mode_t mode), (in, path, mode), fails_in(in, path))
HIDES(unlinkat, (int in, const char *path, int flags), (in, path, flags), fails_in(in, path))
HIDES(fsync, (int handle), (handle), how_by(handle) == FAILED)
HIDES(fdatasync, (int handle), (handle), how_by(handle) == FAILED)
HIDES(ftruncate, (int handle, off_t size), (handle, size), how_by(handle) == FAILED)
HIDES(ftruncate64, (int handle, off64_t size), (handle, size), how_by(handle) == FAILED)

/* Functions that move bytes may also move too few. */
#define MOVES(name, handle, size, parameters, arguments)                                                                           \
    ssize_t name parameters {                                                                                                      \
        int end = how_by(handle);                                                                                                  \
        if (end == FAILED) return -1;                                                                                              \
        if (end == SHORT && size > 1) size /= 2;                                                                                   \
        return NEXT(name) arguments;                                                                                               \
    }

MOVES(write, handle, size, (int handle, const void *data, size_t size), (handle, data, size))
MOVES(pwrite, handle, size, (int handle, const void *data, size_t size, off_t at), (handle, data, size, at))
MOVES(pwrite64, handle, size, (int handle, const void *data, size_t size, off64_t at), (handle, data, size, at))
MOVES(writev, handle, size, (int handle, const struct iovec *data, int size), (handle, data, size))
MOVES(pwritev, handle, size, (int handle, const struct iovec *data, int size, off_t at), (handle, data, size, at))
MOVES(pwritev64, handle, size, (int handle, const struct iovec *data, int size, off64_t at), (handle, data, size, at))
MOVES(sendfile, to, size, (int to, int from, off_t *at, size_t size), (to, from, at, size))
MOVES(sendfile64, to, size, (int to, int from, off64_t *at, size_t size), (to, from, at, size))
MOVES(copy_file_range, to, size, (int from, off64_t *at, int to, off64_t *there, size_t size, unsigned flags),
      (from, at, to, there, size, flags))

static int changes(int flags) { return flags & (O_WRONLY | O_RDWR | O_CREAT); }

#define OPENS(name)                                                                                                                \
    int name(const char *path, int flags, ...) {                                                                                   \
        va_list rest;                                                                                                              \
        va_start(rest, flags);                                                                                                     \
        mode_t mode = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, mode_t) : 0;                              \
        va_end(rest);                                                                                                              \
        return changes(flags) && fails(path) ? -1 : NEXT(name)(path, flags, mode);                                                 \
    }

#define STREAMS(name)                                                                                                              \
    FILE *name(const char *path, const char *mode) { return strpbrk(mode, "wa+") && fails(path) ? NULL : NEXT(name)(path, mode); }

OPENS(open)
OPENS(open64)
STREAMS(fopen)
STREAMS(fopen64)
