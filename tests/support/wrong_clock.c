/* A wall clock that is wrong by $CLOCK_OFFSET seconds, for a process that preloads this library. Monotonic clocks are
   right, and so is what waits until a moment. (libfaketime 0.9.10 breaks time.sleep or Event.wait of Python 3.11.)
   cc -shared -fPIC -o wrong_clock.so wrong_clock.c */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define ORIGINAL(name) static typeof(&name) original; if (!original) original = (typeof(&name))dlsym(RTLD_NEXT, #name)

static long offset(void) {
    static long seconds, known;
    if (!known) {
        const char *text = getenv("CLOCK_OFFSET");
        seconds = text ? atol(text) : 0;
        known = 1;
    }
    return seconds;
}

/* A deadline by the true clock; small numbers are of the monotonic clock. */
static const struct timespec *true_time(const struct timespec *until, struct timespec *copy) {
    if (!until || until->tv_sec < 1000000000) return until;
    *copy = *until;
    copy->tv_sec -= offset();
    return copy;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    ORIGINAL(clock_gettime);
    int failed = original(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    ORIGINAL(gettimeofday);
    int failed = original(now, zone);
    if (!failed) now->tv_sec += offset();
    return failed;
}

time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now) *now = precise.tv_sec;
    return precise.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    struct timespec copy;
    ORIGINAL(pthread_cond_timedwait);
    return original(condition, mutex, true_time(until, &copy));
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    struct timespec copy;
    ORIGINAL(sem_timedwait);
    return original(semaphore, true_time(until, &copy));
}

long syscall(long number, ...) {
    long a[6];
    struct timespec copy;
    va_list all;
    va_start(all, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(all, long);
    va_end(all);
    if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME))
        a[3] = (long)true_time((const struct timespec *)a[3], &copy);
    ORIGINAL(syscall);
    return original(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
