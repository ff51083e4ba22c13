/* Preload this before libfaketime: its 0.9.10 turns a sleep until a monotonic time into one until a negative time, which the kernel
   rejects with EINVAL (wolfcw/libfaketime#426). Here sleeps go to the kernel unchanged. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *request, struct timespec *remaining)
{
    return syscall(SYS_clock_nanosleep, clock, flags, request, remaining) ? errno : 0;
}
