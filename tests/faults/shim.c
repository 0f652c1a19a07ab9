/* Faults in a process's own file system calls, for tests; see shim.py.
 *
 * Preloaded, it sees every call that changes, or that reads, something below one
 * directory, on all threads, and numbers them from 1. At the chosen number the process
 * is killed, or the call fails, or writes or reads only half of its bytes. Or all calls
 * that change something are written down, in the order in which they were done. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT = 0, KILL = -9, SHORT = -1 }; /* else an errno */
enum { CHANGES, GROWING, READS };          /* what is counted */
enum { SHRINKS, GROWS, READ };             /* what a call does */

static char root[PATH_MAX];
static size_t root_size;
static long chosen, seen, hits;
static int action, sticky, counted;
static int journal = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* ---- what the tests call ---- */

void fault_arm(const char *directory, long at, int what, int again, int kind) {
  snprintf(root, sizeof root, "%s", directory);
  root_size = strlen(root);
  chosen = at, action = what, sticky = again, counted = kind;
  seen = hits = 0;
}

void fault_disarm(void) { root_size = 0; }
long fault_seen(void) { return seen; }
long fault_hits(void) { return hits; }
void fault_record(int descriptor) { journal = descriptor; }

static void put(const void *data, size_t size) {
  static ssize_t (*real)(int, const void *, size_t);
  if (!real) real = dlsym(RTLD_NEXT, "write");
  for (const char *at = data; size;) {
    ssize_t done = real(journal, at, size);
    if (done <= 0) abort();
    at += done, size -= (size_t)done;
  }
}

static void note(const char *call, const char *a, const char *b, long offset,
                 const void *data, size_t size) {
  char line[2 * PATH_MAX + 100];
  int length = snprintf(line, sizeof line, "%s%c%s%c%s%c%ld%c%zu\n", call, 0, a, 0, b,
                        0, offset, 0, size);
  put(line, (size_t)length);
  put(data, size);
}

void fault_note(const char *text) {
  if (journal < 0) return;
  pthread_mutex_lock(&lock);
  note("note", text, "", 0, "", 0);
  pthread_mutex_unlock(&lock);
}

/* ---- what is below the directory ---- */

static const char *below(const char *path) {
  if (!root_size || !path || strncmp(path, root, root_size)) return NULL;
  return path[root_size] == '/' || !path[root_size] ? path + root_size : NULL;
}

static const char *of_descriptor(int descriptor, char *buffer) {
  if (!root_size) return NULL;
  char link[64];
  int before = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t size = readlink(link, buffer, PATH_MAX - 1);
  errno = before;
  if (size <= 0) return NULL;
  buffer[size] = 0;
  return below(buffer);
}

static const char *of_path(int directory, const char *path, char *buffer) {
  if (!root_size || !path) return NULL;
  if (path[0] == '/') return below(path);
  char base[PATH_MAX];
  int before = errno;
  ssize_t size;
  if (directory == AT_FDCWD) {
    size = getcwd(base, sizeof base) ? (ssize_t)strlen(base) : -1;
  } else {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    size = readlink(link, base, sizeof base - 1);
  }
  errno = before;
  if (size <= 0) return NULL;
  base[size] = 0;
  snprintf(buffer, PATH_MAX, "%.2000s/%.2000s", base, path);
  return below(buffer);
}

/* ---- the fault ---- */

/* 0 to go on, SHORT, or an errno. A full disk refuses what GROWS. */
static int fault(int does) {
  if ((counted == READS) != (does == READ)) return 0;
  if (counted == GROWING && does != GROWS) return 0;
  long number = __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST);
  if (!action || !(number == chosen || (sticky && number > chosen))) return 0;
  __atomic_add_fetch(&hits, 1, __ATOMIC_SEQ_CST);
  if (action == KILL) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
  }
  return action;
}

/* Does a call of one or two names, unless it is chosen. */
#define CALL(kind, a, b, offset, grows, type, invoke) \
  do { \
    const char *one = (a), *two = (b); \
    if (!one) return invoke; \
    int found = fault(grows); \
    if (found) { \
      errno = found == SHORT ? ENOSPC : found; \
      return -1; \
    } \
    if (journal < 0) return invoke; \
    pthread_mutex_lock(&lock); \
    char first[PATH_MAX], second[PATH_MAX]; \
    snprintf(first, sizeof first, "%s", one); \
    snprintf(second, sizeof second, "%s", two ? two : ""); \
    type result = invoke; \
    if (result >= 0) note(kind, first, second, offset, "", 0); \
    int before = errno; \
    pthread_mutex_unlock(&lock); \
    errno = before; \
    return result; \
  } while (0)

#define PLACE char place[PATH_MAX]; char other[PATH_MAX]; (void)other; (void)place

int fsync(int fd) {
  REAL(fsync);
  PLACE;
  CALL("fsync", of_descriptor(fd, place), NULL, 0, 1, int, real(fd));
}
int fdatasync(int fd) {
  REAL(fdatasync);
  PLACE;
  CALL("fsync", of_descriptor(fd, place), NULL, 0, 1, int, real(fd));
}
int ftruncate(int fd, off_t size) {
  REAL(ftruncate);
  PLACE;
  CALL("truncate", of_descriptor(fd, place), NULL, size, 1, int, real(fd, size));
}
int rename(const char *a, const char *b) {
  REAL(rename);
  PLACE;
  CALL("rename", of_path(AT_FDCWD, a, place), of_path(AT_FDCWD, b, other), 0, 1, int,
       real(a, b));
}
int renameat(int d, const char *a, int e, const char *b) {
  REAL(renameat);
  PLACE;
  CALL("rename", of_path(d, a, place), of_path(e, b, other), 0, 1, int,
       real(d, a, e, b));
}
int renameat2(int d, const char *a, int e, const char *b, unsigned flags) {
  REAL(renameat2);
  PLACE;
  CALL("rename", of_path(d, a, place), of_path(e, b, other), (long)flags, 1, int,
       real(d, a, e, b, flags));
}
int link(const char *a, const char *b) {
  REAL(link);
  PLACE;
  CALL("link", of_path(AT_FDCWD, a, place), of_path(AT_FDCWD, b, other), 0, 1, int,
       real(a, b));
}
int linkat(int d, const char *a, int e, const char *b, int flags) {
  REAL(linkat);
  PLACE;
  CALL("link", of_path(d, a, place), of_path(e, b, other), 0, 1, int,
       real(d, a, e, b, flags));
}
int mkdir(const char *path, mode_t mode) {
  REAL(mkdir);
  PLACE;
  CALL("mkdir", of_path(AT_FDCWD, path, place), NULL, 0, 1, int, real(path, mode));
}
int mkdirat(int d, const char *path, mode_t mode) {
  REAL(mkdirat);
  PLACE;
  CALL("mkdir", of_path(d, path, place), NULL, 0, 1, int, real(d, path, mode));
}
int rmdir(const char *path) {
  REAL(rmdir);
  PLACE;
  CALL("rmdir", of_path(AT_FDCWD, path, place), NULL, 0, 0, int, real(path));
}
int unlink(const char *path) {
  REAL(unlink);
  PLACE;
  CALL("unlink", of_path(AT_FDCWD, path, place), NULL, 0, 0, int, real(path));
}
int unlinkat(int d, const char *path, int flags) {
  REAL(unlinkat);
  PLACE;
  CALL(flags & AT_REMOVEDIR ? "rmdir" : "unlink", of_path(d, path, place), NULL, 0, 0,
       int, real(d, path, flags));
}
int chmod(const char *path, mode_t mode) {
  REAL(chmod);
  PLACE;
  CALL("chmod", of_path(AT_FDCWD, path, place), NULL, 0, 0, int, real(path, mode));
}
int fchmod(int fd, mode_t mode) {
  REAL(fchmod);
  PLACE;
  CALL("chmod", of_descriptor(fd, place), NULL, 0, 0, int, real(fd, mode));
}
int fchmodat(int d, const char *path, mode_t mode, int flags) {
  REAL(fchmodat);
  PLACE;
  CALL("chmod", of_path(d, path, place), NULL, 0, 0, int, real(d, path, mode, flags));
}

/* Fails a call that reads, if it is chosen. */
#define READING(path, failed) \
  do { \
    const char *what = counted == READS ? (path) : NULL; \
    int found = what ? fault(READ) : 0; \
    if (found > 0) { \
      errno = found; \
      return failed; \
    } \
  } while (0)

/* Opening counts as a change if the file is made or written. */
#define OPENED(path, invoke) \
  do { \
    if (!(flags & (O_WRONLY | O_RDWR | O_CREAT))) { \
      READING(path, -1); \
      return invoke; \
    } \
    const char *kind = flags & O_TRUNC ? "create" : "open"; \
    CALL(kind, path, NULL, 0, 1, int, invoke); \
  } while (0)
#define MODE \
  mode_t mode = 0; \
  if (flags & (O_CREAT | O_TMPFILE)) { \
    va_list more; \
    va_start(more, flags); \
    mode = va_arg(more, mode_t); \
    va_end(more); \
  }

int open(const char *path, int flags, ...) {
  static int (*real)(const char *, int, ...);
  if (!real) real = dlsym(RTLD_NEXT, "open");
  PLACE;
  MODE;
  OPENED(of_path(AT_FDCWD, path, place), real(path, flags, mode));
}
int open64(const char *path, int flags, ...) {
  static int (*real)(const char *, int, ...);
  if (!real) real = dlsym(RTLD_NEXT, "open64");
  PLACE;
  MODE;
  OPENED(of_path(AT_FDCWD, path, place), real(path, flags, mode));
}
int openat(int d, const char *path, int flags, ...) {
  static int (*real)(int, const char *, int, ...);
  if (!real) real = dlsym(RTLD_NEXT, "openat");
  PLACE;
  MODE;
  OPENED(of_path(d, path, place), real(d, path, flags, mode));
}
int openat64(int d, const char *path, int flags, ...) {
  static int (*real)(int, const char *, int, ...);
  if (!real) real = dlsym(RTLD_NEXT, "openat64");
  PLACE;
  MODE;
  OPENED(of_path(d, path, place), real(d, path, flags, mode));
}

/* Writes `size` bytes, or half of them. */
#define WRITTEN(fd, data, size, at, invoke) \
  do { \
    PLACE; \
    const char *path = of_descriptor(fd, place); \
    if (!path) return invoke; \
    int found = fault(1); \
    if (found == SHORT && size > 1 && hits == 1) size /= 2, found = 0; \
    if (found) { \
      errno = found == SHORT ? ENOSPC : found; \
      return -1; \
    } \
    if (journal < 0) return invoke; \
    pthread_mutex_lock(&lock); \
    char name[PATH_MAX]; \
    snprintf(name, sizeof name, "%s", path); \
    off_t start = at; \
    ssize_t result = invoke; \
    if (result > 0) note("write", name, "", (long)start, data, (size_t)result); \
    int before = errno; \
    pthread_mutex_unlock(&lock); \
    errno = before; \
    return result; \
  } while (0)

static off_t position(int fd) {
  return fcntl(fd, F_GETFL) & O_APPEND ? lseek(fd, 0, SEEK_END)
                                       : lseek(fd, 0, SEEK_CUR);
}
ssize_t write(int fd, const void *data, size_t size) {
  REAL(write);
  WRITTEN(fd, data, size, position(fd), real(fd, data, size));
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
  REAL(pwrite);
  WRITTEN(fd, data, size, at, real(fd, data, size, at));
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) {
  REAL(pwrite64);
  WRITTEN(fd, data, size, at, real(fd, data, size, at));
}
/* Several buffers become one, so that half of them is easily had. */
static char *joined(const struct iovec *parts, int count, size_t *size) {
  *size = 0;
  for (int i = 0; i < count; i++) *size += parts[i].iov_len;
  char *all = malloc(*size ? *size : 1), *end = all;
  for (int i = 0; i < count; i++)
    end = mempcpy(end, parts[i].iov_base, parts[i].iov_len);
  return all;
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
  REAL(writev);
  PLACE;
  if (!of_descriptor(fd, place)) return real(fd, parts, count);
  size_t size;
  char *all = joined(parts, count, &size);
  ssize_t done = write(fd, all, size);
  free(all);
  return done;
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
  REAL(pwritev);
  PLACE;
  if (!of_descriptor(fd, place)) return real(fd, parts, count, at);
  size_t size;
  char *all = joined(parts, count, &size);
  ssize_t done = pwrite64(fd, all, size, at);
  free(all);
  return done;
}

/* Copies through memory, so that what is written counts like any other write. */
static ssize_t copied(int out, int in, off64_t *at, size_t size) {
  char data[65536];
  if (size > sizeof data) size = sizeof data;
  ssize_t got = at ? pread64(in, data, size, *at) : read(in, data, size);
  ssize_t done = got > 0 ? write(out, data, (size_t)got) : got;
  if (at && done > 0) *at += done;
  return done;
}
#define SENDFILE(name, type) \
  ssize_t name(int out, int in, type *at, size_t size) { \
    REAL(name); \
    PLACE; \
    if (!of_descriptor(out, place)) return real(out, in, at, size); \
    return copied(out, in, (off64_t *)at, size); \
  }
SENDFILE(sendfile, off_t)
SENDFILE(sendfile64, off64_t)

/* ---- reading ---- */

/* Reads up to `size` bytes, or half of them. */
#define GOT(fd, size, invoke) \
  do { \
    PLACE; \
    if (counted != READS || !of_descriptor(fd, place)) return invoke; \
    int found = fault(READ); \
    if (found == SHORT && size > 1) size -= size / 2; \
    if (found > 0) { \
      errno = found; \
      return -1; \
    } \
    return invoke; \
  } while (0)

ssize_t read(int fd, void *data, size_t size) {
  REAL(read);
  GOT(fd, size, real(fd, data, size));
}
ssize_t pread(int fd, void *data, size_t size, off_t at) {
  REAL(pread);
  GOT(fd, size, real(fd, data, size, at));
}
ssize_t pread64(int fd, void *data, size_t size, off_t at) {
  REAL(pread64);
  GOT(fd, size, real(fd, data, size, at));
}
/* Of several buffers, the first alone is filled, or half of it: that is short, too. */
ssize_t readv(int fd, const struct iovec *parts, int count) {
  REAL(readv);
  PLACE;
  if (counted != READS || count < 1 || !of_descriptor(fd, place))
    return real(fd, parts, count);
  return read(fd, parts->iov_base, parts->iov_len);
}
#define INTO_PARTS(name, type) \
  ssize_t name(int fd, const struct iovec *parts, int count, type at) { \
    REAL(name); \
    PLACE; \
    if (counted != READS || count < 1 || !of_descriptor(fd, place)) \
      return real(fd, parts, count, at); \
    return pread64(fd, parts->iov_base, parts->iov_len, at); \
  }
INTO_PARTS(preadv, off_t)
INTO_PARTS(preadv64, off64_t)
#define INTO_PARTS_2(name, type) \
  ssize_t name(int fd, const struct iovec *parts, int count, type at, int flags) { \
    REAL(name); \
    PLACE; \
    if (counted != READS || count < 1 || !of_descriptor(fd, place)) \
      return real(fd, parts, count, at, flags); \
    return pread64(fd, parts->iov_base, parts->iov_len, at); \
  }
INTO_PARTS_2(preadv2, off_t)
INTO_PARTS_2(preadv64v2, off64_t)

/* Called while threads are made, too, long before anything is looked up. */
void *mmap(void *at, size_t size, int protect, int flags, int fd, off_t offset) {
  if (fd >= 0 && counted == READS) {
    PLACE;
    READING(of_descriptor(fd, place), MAP_FAILED);
  }
  return (void *)syscall(SYS_mmap, at, size, protect, flags, fd, offset);
}
void *mmap64(void *at, size_t size, int protect, int flags, int fd, off64_t offset) {
  return mmap(at, size, protect, flags, fd, offset);
}

/* What is in a directory; a list may end early, with an error. */
DIR *opendir(const char *path) {
  REAL(opendir);
  PLACE;
  READING(of_path(AT_FDCWD, path, place), NULL);
  return real(path);
}
struct dirent *readdir(DIR *directory) {
  REAL(readdir);
  PLACE;
  READING(of_descriptor(dirfd(directory), place), NULL);
  return real(directory);
}
struct dirent64 *readdir64(DIR *directory) {
  REAL(readdir64);
  PLACE;
  READING(of_descriptor(dirfd(directory), place), NULL);
  return real(directory);
}

/* Looking at what is there counts, too. */
#define LOOKED(name, path, arguments, given) \
  int name arguments { \
    REAL(name); \
    PLACE; \
    READING(path, -1); \
    return real given; \
  }
LOOKED(stat, of_path(AT_FDCWD, file, place),
       (const char *file, struct stat *found), (file, found))
LOOKED(stat64, of_path(AT_FDCWD, file, place),
       (const char *file, struct stat64 *found), (file, found))
LOOKED(lstat, of_path(AT_FDCWD, file, place),
       (const char *file, struct stat *found), (file, found))
LOOKED(lstat64, of_path(AT_FDCWD, file, place),
       (const char *file, struct stat64 *found), (file, found))
LOOKED(fstat, of_descriptor(fd, place),
       (int fd, struct stat *found), (fd, found))
LOOKED(fstat64, of_descriptor(fd, place),
       (int fd, struct stat64 *found), (fd, found))
LOOKED(fstatat, of_path(d, file, place),
       (int d, const char *file, struct stat *found, int flags), (d, file, found, flags))
LOOKED(fstatat64, of_path(d, file, place),
       (int d, const char *file, struct stat64 *found, int flags),
       (d, file, found, flags))
