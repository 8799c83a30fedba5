// Entering a call: counted, refused when a test said so, checked against captures; and cuGetProcAddress.
#define _GNU_SOURCE
#include "sim.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_NAMES = 128 };

static struct { char name[48]; long calls; } counted[MOST_NAMES];
static long synchronising;
static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;

int sim_initialized;
static pid_t initialized_by;
__thread int sim_thread_mode;

int sim_setting(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value && *value ? atoi(value) : otherwise;
}

static long count(const char *name) {
    pthread_mutex_lock(&counting);
    long calls = 0;
    for (int i = 0; i < MOST_NAMES; i++) {
        if (!counted[i].name[0]) strncpy(counted[i].name, name, sizeof counted[i].name - 1);
        if (!strcmp(counted[i].name, name)) {
            calls = ++counted[i].calls;
            break;
        }
    }
    pthread_mutex_unlock(&counting);
    return calls;
}

// SIM_CUDA_FAULTS="cuMemAlloc:2,cuEventQuery:700:5": an error code, from the n-th call of the process on.
static CUresult injected(const char *name, long calls) {
    const char *rest = getenv("SIM_CUDA_FAULTS");
    while (rest && *rest) {
        char called[48] = "";
        int code = 0, from = 1;
        if (sscanf(rest, "%47[^:]:%d:%d", called, &code, &from) >= 2 && !strcmp(called, name) && calls >= from)
            return code;
        rest = strchr(rest, ',');
        if (rest) rest++;
    }
    return SUCCESS;
}

static int captured_globally(context *of) {
    for (stream *s = of->streams; s; s = s->next)
        if (s->capturing == 1 && (s->capture_mode == 0 || pthread_equal(s->captured_by, pthread_self()))) return 1;
    return 0;
}

CUresult sim_enter(const char *name, int kind) {
    CUresult fault = injected(name, count(name));
    if (fault) return fault;
    if (kind & SYNCHRONISES) __atomic_fetch_add(&synchronising, 1, __ATOMIC_RELAXED);
    if (kind & BEFORE_INIT) return SUCCESS;
    if (!sim_initialized || initialized_by != getpid()) return NOT_INITIALIZED;
    sim_look_after_owners();
    context *current = sim_current();
    if (!(kind & NEEDS_CONTEXT)) return SUCCESS;
    if (!current) return INVALID_CONTEXT;
    if (current->sticky) return current->sticky;
    if ((kind & UNSAFE_IN_CAPTURE) && sim_thread_mode != 2 && captured_globally(current)) {
        sim_invalidate_captures(current);
        return CAPTURE_UNSUPPORTED;
    }
    return SUCCESS;
}

EXPORT CUresult cuInit(unsigned flags) {
    ENTER("cuInit", BEFORE_INIT);
    if (flags) return INVALID_VALUE;
    if (sim_initialized && initialized_by != getpid()) return NOT_INITIALIZED;  // a forked child
    sim_initialize();
    if (sim_visible(0) < 0) return NO_DEVICE;
    sim_initialized = 1;
    initialized_by = getpid();
    return SUCCESS;
}

static int version(void) { return sim_setting("SIM_CUDA_VERSION", 13000); }

EXPORT CUresult cuDriverGetVersion(int *found) {
    ENTER("cuDriverGetVersion", BEFORE_INIT);
    *found = version();
    return SUCCESS;
}

static const struct { CUresult code; const char *name, *text; } errors[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
};

EXPORT CUresult cuGetErrorName(CUresult code, const char **name) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return *name = errors[i].name, SUCCESS;
    *name = NULL;
    return INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult code, const char **text) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return *text = errors[i].text, SUCCESS;
    *text = NULL;
    return INVALID_VALUE;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER("cuThreadExchangeStreamCaptureMode", ANY);
    int before = sim_thread_mode;
    sim_thread_mode = *mode;
    *mode = before;
    return SUCCESS;
}

// A name without a suffix is the newest of its versions that is no newer than was asked for.
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **found, int asked, uint64_t flags, int *status) {
    (void)flags;
    char suffixed[64];
    *found = NULL;
    int hidden = !strcmp(name, "cuCtxRecordEvent") && version() < 12050;
    int first_uuid = !strcmp(name, "cuDeviceGetUuid") && asked < 11040;
    void *self = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
    if (!hidden && !first_uuid && snprintf(suffixed, sizeof suffixed, "%s_v2", name) < (int)sizeof suffixed)
        *found = dlsym(self, suffixed);
    if (!hidden && !*found) *found = dlsym(self, name);
    if (self) dlclose(self);
    if (status) *status = *found ? 0 : 1;
    return *found ? SUCCESS : NOT_FOUND;
}

// For tests.

EXPORT long simCalls(const char *name) {
    long calls = 0;
    pthread_mutex_lock(&counting);
    for (int i = 0; i < MOST_NAMES && counted[i].name[0]; i++)
        if (!*name || !strcmp(counted[i].name, name)) calls += counted[i].calls;
    pthread_mutex_unlock(&counting);
    return calls;
}

EXPORT long simSynchronisingCalls(void) { return __atomic_load_n(&synchronising, __ATOMIC_RELAXED); }
