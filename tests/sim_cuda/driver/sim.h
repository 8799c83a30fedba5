// A simulated CUDA driver: what its files share. README.md in the folder above says which rule is whose.
#pragma once

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct { unsigned char bytes[16]; } CUuuid;
typedef struct { unsigned char reserved[64]; } CUipcMemHandle;

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
};

enum { MOST_DEVICES = 8, MOST_TARGETS = 64 };

// streams.c

struct op;

typedef struct stream {
    struct context *context;
    int is_null;
    int is_blocking;
    int capturing;  // 0: no, 1: yes, 2: it was invalidated
    int capture_mode;
    pthread_t captured_by;
    int started;
    pthread_t thread;
    struct op *head, *tail;
    uint64_t enqueued, completed;
    struct stream *next;
} stream;

// What has to be done before a moment: so many operations of each stream.
typedef struct {
    int count;
    struct { stream *of; uint64_t number; } item[MOST_TARGETS];
} moment;

typedef struct event {
    struct context *context;
    int captured;
    moment recorded;
} event;

typedef struct context {
    CUdevice device;
    int references;
    CUresult sticky;  // an illegal access: every later call of the context fails with it
    stream null_stream;
    stream *streams;
} context;

typedef enum { COPY, FILL, DELAY, WAIT } op_kind;

typedef struct op {
    op_kind kind;
    void *to;
    const void *from;
    size_t bytes;
    int value;
    unsigned delay_us;
    moment until;
    void *staged;  // freed when it is done
    struct op *next;
} op;

extern pthread_mutex_t sim_lock;  // guards everything of this process
extern pthread_cond_t sim_changed;

// A handle of the caller's as a stream of its current context; NULL is the null stream.
stream *sim_stream(void *handle);
void sim_enqueue(stream *on, op what);
int sim_is_done(const moment *when);
void sim_wait_for(const moment *when);
moment sim_now(stream *of);
moment sim_now_in_context(context *of);
void sim_invalidate_captures(context *of);

// devices.c

context *sim_current(void);
context *sim_context_of(const stream *which);  // NULL if it is no stream
int sim_visible(CUdevice ordinal);  // its physical number, -1 if there is none
CUuuid sim_uuid(int device);
unsigned long long sim_memory(void);

// core.c: every entry begins with one of these

typedef enum { ANY = 0, NEEDS_CONTEXT = 1, UNSAFE_IN_CAPTURE = 2, SYNCHRONISES = 4, BEFORE_INIT = 8 } entry_kind;

CUresult sim_enter(const char *name, int kind);
int sim_setting(const char *name, int otherwise);
extern __thread int sim_thread_mode;  // of cuThreadExchangeStreamCaptureMode; 2 is relaxed
extern int sim_initialized;
void sim_initialize(void);

#define ENTER(name, kind)                          \
    do {                                           \
        CUresult refused = sim_enter(name, kind);  \
        if (refused) return refused;               \
    } while (0)

// shared.c: what all processes of a simulated machine see, a file in $SIM_CUDA_DIR

enum { MOST_ALLOCATIONS = 256, MOST_IMPORTERS = 64 };

typedef struct { pid_t pid; uint64_t started, pid_namespace; } process;

typedef struct {
    int used;
    int device;
    uint64_t size;
    uint64_t serial;
    int freed;
    process owner;
    uint64_t pid_namespace, ipc_namespace;
    process importers[MOST_IMPORTERS];
    unsigned char handle[64];
} allocation;

typedef struct {
    uint64_t serial;
    allocation allocations[MOST_ALLOCATIONS];
} machine;

machine *sim_machine(void);  // locked until sim_release()
void sim_release(void);
process sim_self(void);
int sim_is_alive(process who);
void *sim_map(const allocation *memory);
uint64_t sim_namespace(const char *kind);

// memory.c: what is mapped in this process

typedef struct range {
    void *base;
    size_t size;
    int is_host;
    int opened;  // how often, if it was imported
    int lost;
    process owner;
    uint64_t serial;
    int device;
    struct range *next;
} range;

range *sim_range(CUdeviceptr address, size_t bytes);
range *sim_add_range(void *base, size_t size, const allocation *memory);
void sim_remove_range(range *which);
void sim_look_after_owners(void);
extern range *sim_ranges;
