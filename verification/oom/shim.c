/* Allocations that fail, for tests; see shim.py.
 *
 * Preloaded, it numbers what a process asks the system for, from 1 and over all threads:
 * memory of Python and of numpy, maps of files and of memory, threads. From the chosen
 * number on, some of them fail. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PYTHON = 1, NUMPY = 2, MAPS = 4, THREADS = 8 };
enum { DOMAINS = 3 }; /* of Python's allocators: raw, mem, object */

typedef struct { /* PyMemAllocatorEx, and what numpy's handlers end with */
  void *ctx;
  void *(*malloc)(void *, size_t);
  void *(*calloc)(void *, size_t, size_t);
  void *(*realloc)(void *, void *, size_t);
  void (*free)(void *, void *);
} Allocator;

static Allocator python[DOMAINS], numpy;
static long seen, hits, first, last;
static size_t smallest;
static int kinds;
static __thread int is_exempt;

static int fails(int kind, size_t size) {
  if (!(kinds & kind) || size < smallest) return 0;
  if (is_exempt && kind != THREADS) return 0; /* Python bears a lack of threads */
  long number = __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST);
  if (number < first || number > last) return 0;
  __atomic_add_fetch(&hits, 1, __ATOMIC_SEQ_CST);
  return 1;
}

/* ---- what the tests call ---- */

void oom_arm(int which, long from, long to, size_t bytes) {
  seen = hits = 0;
  first = from, last = to, smallest = bytes;
  __atomic_store_n(&kinds, which, __ATOMIC_SEQ_CST);
}
void oom_disarm(void) { __atomic_store_n(&kinds, 0, __ATOMIC_SEQ_CST); }
void oom_exempt(int now) { is_exempt = now; }
long oom_seen(void) { return seen; }
long oom_hits(void) { return hits; }

/* ---- memory of Python and numpy ---- */

#define HOOKS(name, kind) \
  static void *name##_malloc(void *ctx, size_t size) { \
    Allocator *real = ctx; \
    return fails(kind, size) ? NULL : real->malloc(real->ctx, size); \
  } \
  static void *name##_calloc(void *ctx, size_t count, size_t size) { \
    Allocator *real = ctx; \
    return fails(kind, count * size) ? NULL : real->calloc(real->ctx, count, size); \
  } \
  static void *name##_realloc(void *ctx, void *at, size_t size) { \
    Allocator *real = ctx; \
    return fails(kind, size) ? NULL : real->realloc(real->ctx, at, size); \
  }
HOOKS(python, PYTHON)
HOOKS(numpy, NUMPY)

static void python_free(void *ctx, void *at) {
  Allocator *real = ctx;
  real->free(real->ctx, at);
}

/* Hooks into the allocators of Python, and into the handler of numpy's arrays. */
void oom_install(void *handler) {
  void (*get)(int, Allocator *) = dlsym(RTLD_DEFAULT, "PyMem_GetAllocator");
  void (*set)(int, Allocator *) = dlsym(RTLD_DEFAULT, "PyMem_SetAllocator");
  for (int domain = 0; domain < DOMAINS; domain++) {
    Allocator hooks = {&python[domain], python_malloc, python_calloc, python_realloc,
                       python_free};
    get(domain, &python[domain]);
    set(domain, &hooks);
  }
  /* A name of 127 bytes and a version are before it. Its free has the size as well. */
  Allocator *ours = (Allocator *)((char *)handler + 128);
  numpy = *ours;
  ours->ctx = &numpy;
  ours->malloc = numpy_malloc, ours->calloc = numpy_calloc;
  ours->realloc = numpy_realloc;
}

/* ---- maps and threads ---- */

void *mmap(void *at, size_t size, int protect, int flags, int fd, off_t offset) {
  if (fails(MAPS, size)) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return (void *)syscall(SYS_mmap, at, size, protect, flags, fd, offset);
}
void *mmap64(void *at, size_t size, int protect, int flags, int fd, off64_t offset) {
  return mmap(at, size, protect, flags, fd, offset);
}

typedef struct {
  void *(*begin)(void *);
  void *argument;
} Work;

/* A thread is exempt until its own work begins; see exempt_thread_starts in shim.py. */
static void *start(void *given) {
  Work work = *(Work *)given;
  free(given);
  is_exempt = 1;
  return work.begin(work.argument);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                   void *(*begin)(void *), void *argument) {
  static __typeof__(&pthread_create) real;
  if (!real) real = (__typeof__(&pthread_create))dlsym(RTLD_NEXT, "pthread_create");
  if (fails(THREADS, 0)) return EAGAIN;
  Work *work = malloc(sizeof *work);
  *work = (Work){begin, argument};
  return real(thread, attributes, start, work);
}
