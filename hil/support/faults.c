/* A preloaded library that counts the calls that change files below one folder. At the n-th call it kills the process
 * or fails the call with an errno. It counts nothing until faults_arm() was called. See hil/crash_points.py.
 *
 *     cc -shared -fPIC -O1 -U_FORTIFY_SOURCE -o faults.so hil/support/faults.c -ldl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long left = -1; /* calls until the fault; -1: not armed */
static int error_number; /* 0: SIGKILL */
static int log_fd = -1; /* one line per call, for the list */
static char struck[64 + PATH_MAX];

/* Start counting; the n-th call (from 0) gets the fault. An n beyond the last call only counts. */
void faults_arm(const char *below, long n, int error, int log)
{
    snprintf(folder, sizeof folder, "%s", below);
    error_number = error;
    log_fd = log;
    struck[0] = 0;
    left = n;
}

/* Stop counting; return the call that got the fault, or "". */
const char *faults_disarm(void)
{
    left = -1;
    return struck;
}

static int strike(const char *call, const char *path)
{
    size_t n = strlen(folder);
    char line[64 + PATH_MAX];
    if (left < 0 || strncmp(path, folder, n) != 0 || (path[n] != '/' && path[n] != 0))
        return 0;
    int size = snprintf(line, sizeof line, "%s %s\n", call, path[n] ? path + n + 1 : ".");
    if (log_fd >= 0)
        (void)!syscall(SYS_write, log_fd, line, size);
    if (left-- > 0)
        return 0;
    left = -1;
    memcpy(struck, line, size - 1);
    struck[size - 1] = 0;
    if (error_number == 0)
        kill(getpid(), SIGKILL);
    errno = error_number;
    return 1;
}

static void path_of(int fd, char *out)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    out[n < 0 ? 0 : n] = 0;
}

static void path_at(int fd, const char *path, char *out)
{
    char base[PATH_MAX];
    if (path[0] == '/' || fd == AT_FDCWD) {
        snprintf(out, 2 * PATH_MAX, "%s", path);
        return;
    }
    path_of(fd, base);
    snprintf(out, 2 * PATH_MAX, "%s/%s", base, path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define AT(call, fd, path)                                                                                             \
    do {                                                                                                               \
        char full[2 * PATH_MAX];                                                                                       \
        if (left >= 0) {                                                                                               \
            path_at(fd, path, full);                                                                                   \
            if (strike(call, full))                                                                                    \
                return -1;                                                                                             \
        }                                                                                                              \
    } while (0)
#define ON(call, fd)                                                                                                   \
    do {                                                                                                               \
        char full[PATH_MAX];                                                                                           \
        if (left >= 0) {                                                                                               \
            path_of(fd, full);                                                                                         \
            if (strike(call, full))                                                                                    \
                return -1;                                                                                             \
        }                                                                                                              \
    } while (0)

#define CHANGES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))
#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...)                                                                         \
    {                                                                                                                  \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = va_arg(more, mode_t);                                                                            \
        va_end(more);                                                                                                  \
        if (CHANGES(flags))                                                                                            \
            AT("open", AT_FDCWD, path);                                                                                \
        return REAL(name)(path, flags, mode);                                                                          \
    }
#define OPENAT(name)                                                                                                   \
    int name(int fd, const char *path, int flags, ...)                                                                 \
    {                                                                                                                  \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = va_arg(more, mode_t);                                                                            \
        va_end(more);                                                                                                  \
        if (CHANGES(flags))                                                                                            \
            AT("open", fd, path);                                                                                      \
        return REAL(name)(fd, path, flags, mode);                                                                      \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int fd, const void *data, size_t size)
{
    ON("write", fd);
    return REAL(write)(fd, data, size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at)
{
    ON("write", fd);
    return REAL(pwrite64)(fd, data, size, at);
}

int fsync(int fd)
{
    ON("fsync", fd);
    return REAL(fsync)(fd);
}

int fdatasync(int fd)
{
    ON("fsync", fd);
    return REAL(fdatasync)(fd);
}

int ftruncate64(int fd, off64_t size)
{
    ON("truncate", fd);
    return REAL(ftruncate64)(fd, size);
}

int rename(const char *from, const char *to)
{
    AT("rename", AT_FDCWD, from);
    return REAL(rename)(from, to);
}

int renameat(int a, const char *from, int b, const char *to)
{
    AT("rename", a, from);
    return REAL(renameat)(a, from, b, to);
}

int link(const char *from, const char *to)
{
    AT("link", AT_FDCWD, to);
    return REAL(link)(from, to);
}

int symlink(const char *target, const char *path)
{
    AT("symlink", AT_FDCWD, path);
    return REAL(symlink)(target, path);
}

int mkdir(const char *path, mode_t mode)
{
    AT("mkdir", AT_FDCWD, path);
    return REAL(mkdir)(path, mode);
}

int mkdirat(int fd, const char *path, mode_t mode)
{
    AT("mkdir", fd, path);
    return REAL(mkdirat)(fd, path, mode);
}

int unlink(const char *path)
{
    AT("unlink", AT_FDCWD, path);
    return REAL(unlink)(path);
}

int unlinkat(int fd, const char *path, int flags)
{
    AT(flags & AT_REMOVEDIR ? "rmdir" : "unlink", fd, path);
    return REAL(unlinkat)(fd, path, flags);
}

int rmdir(const char *path)
{
    AT("rmdir", AT_FDCWD, path);
    return REAL(rmdir)(path);
}

int chmod(const char *path, mode_t mode)
{
    AT("chmod", AT_FDCWD, path);
    return REAL(chmod)(path, mode);
}

int fchmod(int fd, mode_t mode)
{
    ON("chmod", fd);
    return REAL(fchmod)(fd, mode);
}
