// Devices, as CUDA_VISIBLE_DEVICES shows them, and the contexts of each thread.
#define _GNU_SOURCE
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_CONTEXTS = 16 };

static int visible[MOST_DEVICES], visible_count;
static context primary[MOST_DEVICES];
static __thread context *stack[MOST_CONTEXTS];
static __thread int depth;

static int is_mig(void) { return sim_setting("SIM_CUDA_MIG", 0); }

unsigned long long sim_memory(void) { return (unsigned long long)sim_setting("SIM_CUDA_MEMORY_MIB", 1024) << 20; }

CUuuid sim_uuid(int device) {
    CUuuid uuid;
    for (int i = 0; i < 16; i++) uuid.bytes[i] = (unsigned char)(0x11 * (device + 1) + i);
    return uuid;
}

static void as_text(int device, char *text) {
    CUuuid uuid = sim_uuid(device);
    if (is_mig()) uuid.bytes[0] ^= 0xff;
    text += sprintf(text, is_mig() ? "MIG-" : "GPU-");
    for (int i = 0; i < 16; i++) text += sprintf(text, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid.bytes[i]);
}

// An ordinal, or a UUID that may be cut off as long as it is unique; -1 for anything else.
static int named(const char *name, int devices) {
    char *end, text[64];
    long ordinal = strtol(name, &end, 10);
    if (end != name && !*end) return ordinal >= 0 && ordinal < devices ? (int)ordinal : -1;
    int found = -1;
    for (int device = 0; device < devices; device++) {
        as_text(device, text);
        if (strlen(name) > 4 && !strncmp(text, name, strlen(name))) {
            if (found >= 0) return -1;
            found = device;
        }
    }
    return found;
}

void sim_initialize(void) {
    int devices = sim_setting("SIM_CUDA_DEVICES", 2);
    const char *listed = getenv("CUDA_VISIBLE_DEVICES");
    visible_count = 0;
    if (!listed) {
        while (visible_count < devices) visible[visible_count] = visible_count, visible_count++;
        return;
    }
    char copy[512];
    snprintf(copy, sizeof copy, "%s", listed);
    for (char *name = strtok(copy, ","); name; name = strtok(NULL, ",")) {
        int device = named(name, devices);
        if (device < 0) break;  // it and all that come after it are hidden
        visible[visible_count++] = device;
    }
}

int sim_visible(CUdevice ordinal) { return ordinal >= 0 && ordinal < visible_count ? visible[ordinal] : -1; }

EXPORT CUresult cuDeviceGetCount(int *count) {
    ENTER("cuDeviceGetCount", ANY);
    *count = visible_count;
    return SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER("cuDeviceGet", ANY);
    *device = ordinal;
    return sim_visible(ordinal) < 0 ? INVALID_DEVICE : SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    ENTER("cuDeviceGetName", ANY);
    snprintf(name, size, is_mig() ? "Simulated GPU %d MIG 1g.10gb" : "Simulated GPU %d", sim_visible(device));
    return sim_visible(device) < 0 ? INVALID_DEVICE : SUCCESS;
}

// The first version knows the whole device only, the second one the MIG instance.
EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    ENTER("cuDeviceGetUuid", ANY);
    *uuid = sim_uuid(sim_visible(device));
    return sim_visible(device) < 0 ? INVALID_DEVICE : SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    ENTER("cuDeviceGetUuid", ANY);
    *uuid = sim_uuid(sim_visible(device));
    if (is_mig()) uuid->bytes[0] ^= 0xff;
    return sim_visible(device) < 0 ? INVALID_DEVICE : SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    ENTER("cuDeviceTotalMem", ANY);
    *bytes = sim_memory();
    return sim_visible(device) < 0 ? INVALID_DEVICE : SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    ENTER("cuDeviceGetAttribute", ANY);
    enum { UNIFIED_ADDRESSING = 41, COMPUTE_MODE = 20, INTEGRATED = 18, IPC_EVENT_SUPPORTED = 125 };
    *value = attribute == UNIFIED_ADDRESSING || (attribute == IPC_EVENT_SUPPORTED && sim_setting("SIM_CUDA_IPC", 1));
    return sim_visible(device) < 0 ? INVALID_DEVICE : SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(context **made, CUdevice device) {
    ENTER("cuDevicePrimaryCtxRetain", ANY);
    if (sim_visible(device) < 0) return INVALID_DEVICE;
    pthread_mutex_lock(&sim_lock);
    context *found = &primary[device];
    found->references++;
    found->device = device;
    found->null_stream.context = found;
    found->null_stream.is_null = 1;
    *made = found;
    pthread_mutex_unlock(&sim_lock);
    return SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER("cuDevicePrimaryCtxRelease", ANY);
    if (sim_visible(device) < 0 || !primary[device].references) return INVALID_CONTEXT;
    primary[device].references--;
    return SUCCESS;
}

context *sim_context_of(const stream *which) {
    for (int ordinal = 0; ordinal < visible_count; ordinal++)
        for (stream *s = primary[ordinal].streams; s; s = s->next)
            if (s == which) return &primary[ordinal];
    return NULL;
}

context *sim_current(void) { return depth ? stack[depth - 1] : NULL; }

EXPORT CUresult cuCtxSetCurrent(context *to) {
    ENTER("cuCtxSetCurrent", ANY);
    if (depth) depth--;
    if (to) stack[depth++] = to;
    return SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(context **found) {
    ENTER("cuCtxGetCurrent", ANY);
    *found = sim_current();
    return SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(context *to) {
    ENTER("cuCtxPushCurrent", ANY);
    if (!to || depth == MOST_CONTEXTS) return INVALID_CONTEXT;
    if (to->sticky) return to->sticky;
    stack[depth++] = to;
    return SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(context **found) {
    ENTER("cuCtxPopCurrent", ANY);
    if (!depth) return INVALID_CONTEXT;
    depth--;
    if (found) *found = stack[depth];
    return SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER("cuCtxGetDevice", NEEDS_CONTEXT);
    *device = sim_current()->device;
    return SUCCESS;
}
