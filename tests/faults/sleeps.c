/* Preloaded before libfaketime, whose 0.9.10 makes a sleep until a monotonic time one until a negative time, which the kernel
   refuses with EINVAL (wolfcw/libfaketime#426): sleeps go to the kernel as they are. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *request, struct timespec *remaining)
{
    return syscall(SYS_clock_nanosleep, clock, flags, request, remaining) ? errno : 0;
}
