// A library to preload: fails or kills at chosen file operations below given folders, and shifts the wall clock.
//
// The file that the variable SOAK_SHIM names is mapped as `struct control`, shared with the test that changes it while
// the processes run (shim.py has the same layout). What is not covered: memory maps, standard I/O inside libc, times of
// files, and absolute times given to the kernel by other calls than the two waits below.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { WRITES = 1, READS = 2 };

struct control {
    _Atomic int64_t offset;  // nanoseconds added to the wall clock
    _Atomic int64_t visits;  // file operations of `classes` below `folder` since it was armed, of all processes
    int64_t first, last;     // those that fail, counted from 1
    int32_t classes;         // WRITES | READS; 0: not armed
    int32_t error;           // errno; 0: SIGKILL to the process group
    _Atomic int64_t done;    // operations that failed
    char folder[PATH_MAX];
};

static struct control *control;

__attribute__((constructor)) static void map_control(void) {
    const char *path = getenv("SOAK_SHIM");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) control = mapped;
}

#define REAL(name) ({ \
    static __typeof__(&name) found; \
    if (!found) found = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
    found; })

static int below(const char *path) {
    size_t length = strlen(control->folder);
    return length && !strncmp(path, control->folder, length) && (path[length] == '/' || !path[length]);
}

static int below_descriptor(int file) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below(path);
}

// Return -1 with errno if this operation is to fail, else 0.
static int visit(void) {
    int64_t number = atomic_fetch_add(&control->visits, 1) + 1;
    if (number < control->first || number > control->last) return 0;
    atomic_fetch_add(&control->done, 1);
    if (!control->error) kill(0, SIGKILL);
    errno = control->error;
    return -1;
}

static int armed(int kind) { return control && (control->classes & kind); }
static int fails(int kind, int file) { return armed(kind) && below_descriptor(file) ? visit() : 0; }
static int fails_at(int kind, int folder, const char *path) {
    if (!armed(kind)) return 0;
    return (path[0] == '/' || folder == AT_FDCWD ? below(path) : below_descriptor(folder)) ? visit() : 0;
}
static int opens(int flags) { return flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC) ? WRITES : READS; }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        return fails_at(opens(flags), AT_FDCWD, path) ? -1 : REAL(name)(path, flags, mode); \
    }
#define OPEN_AT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        return fails_at(opens(flags), folder, path) ? -1 : REAL(name)(folder, path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
OPEN_AT(openat)
OPEN_AT(openat64)

#define OF_FILE(kind, result, name, parameters, arguments) \
    result name parameters { return fails(kind, file) ? -1 : REAL(name) arguments; }
OF_FILE(READS, ssize_t, read, (int file, void *to, size_t size), (file, to, size))
OF_FILE(READS, ssize_t, pread64, (int file, void *to, size_t size, off64_t at), (file, to, size, at))
OF_FILE(WRITES, ssize_t, write, (int file, const void *from, size_t size), (file, from, size))
OF_FILE(WRITES, ssize_t, pwrite64, (int file, const void *from, size_t size, off64_t at), (file, from, size, at))
OF_FILE(WRITES, ssize_t, writev, (int file, const struct iovec *parts, int count), (file, parts, count))
OF_FILE(WRITES, ssize_t, sendfile64, (int file, int from, off64_t *at, size_t size), (file, from, at, size))
OF_FILE(WRITES, int, fsync, (int file), (file))
OF_FILE(WRITES, int, fdatasync, (int file), (file))
OF_FILE(WRITES, int, ftruncate64, (int file, off64_t size), (file, size))

#define OF_PATH(name, parameters, arguments) \
    int name parameters { return fails_at(WRITES, AT_FDCWD, path) ? -1 : REAL(name) arguments; }
#define OF_PATH_AT(name, parameters, arguments) \
    int name parameters { return fails_at(WRITES, folder, path) ? -1 : REAL(name) arguments; }
int renameat(int, const char *, int, const char *);
OF_PATH(rename, (const char *path, const char *to), (path, to))
OF_PATH_AT(renameat, (int folder, const char *path, int other, const char *to), (folder, path, other, to))
OF_PATH(mkdir, (const char *path, mode_t mode), (path, mode))
OF_PATH(rmdir, (const char *path), (path))
OF_PATH(unlink, (const char *path), (path))
OF_PATH_AT(unlinkat, (int folder, const char *path, int flags), (folder, path, flags))
OF_PATH_AT(mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode))

static struct timespec shifted(struct timespec at, int64_t offset) {
    int64_t nanoseconds = at.tv_nsec + offset % 1000000000;
    at.tv_sec += offset / 1000000000 + (nanoseconds >= 1000000000) - (nanoseconds < 0);
    at.tv_nsec = nanoseconds + (nanoseconds < 0 ? 1000000000 : nanoseconds >= 1000000000 ? -1000000000 : 0);
    return at;
}
static int64_t offset(void) { return control ? atomic_load(&control->offset) : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = REAL(clock_gettime)(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) *now = shifted(*now, offset());
    return result;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone; // obsolete
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    *now = (struct timeval){precise.tv_sec, precise.tv_nsec / 1000};
    return 0;
}
time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return result ? *result = now.tv_sec : now.tv_sec;
}

// Absolute times of the shifted wall clock become the kernel's; those of the monotonic clock are those since the boot.
static struct timespec kernel_time(const struct timespec *at) {
    return at->tv_sec > 500000000 ? shifted(*at, -offset()) : *at;
}
int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict lock,
                           const struct timespec *restrict until) {
    static __typeof__(&pthread_cond_timedwait) found;
    if (!found) found = (__typeof__(found))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!found) found = (__typeof__(found))dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec at = kernel_time(until);
    return found(condition, lock, &at);
}
int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    struct timespec at = kernel_time(until);
    return REAL(sem_timedwait)(semaphore, &at);
}
