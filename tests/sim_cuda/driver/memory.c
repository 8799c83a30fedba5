// Device memory: allocated, filled, copied; and what of it is mapped in this process.
#define _GNU_SOURCE
#include "sim.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

range *sim_ranges;

range *sim_range(CUdeviceptr address, size_t bytes) {
    for (range *r = sim_ranges; r; r = r->next)
        if (address >= (CUdeviceptr)r->base && address + bytes <= (CUdeviceptr)r->base + r->size) return r;
    return NULL;
}

range *sim_add_range(void *base, size_t size, const allocation *memory) {
    range *made = calloc(1, sizeof *made);
    made->base = base;
    made->size = size;
    if (memory) {
        made->owner = memory->owner;
        made->serial = memory->serial;
        made->device = memory->device;
    }
    pthread_mutex_lock(&sim_lock);
    made->next = sim_ranges;
    sim_ranges = made;
    pthread_mutex_unlock(&sim_lock);
    return made;
}

void sim_remove_range(range *which) {
    pthread_mutex_lock(&sim_lock);
    for (range **at = &sim_ranges; *at; at = &(*at)->next)
        if (*at == which) {
            *at = which->next;
            break;
        }
    munmap(which->base, which->size);
    free(which);
    pthread_mutex_unlock(&sim_lock);
}

// SIM_CUDA_EXPORTER_GONE=unmap: memory whose exporter has died is gone for those who had imported it, too.
void sim_look_after_owners(void) {
    const char *how = getenv("SIM_CUDA_EXPORTER_GONE");
    if (!how || strcmp(how, "unmap")) return;
    pthread_mutex_lock(&sim_lock);
    for (range *r = sim_ranges; r; r = r->next)
        if (r->opened && !r->lost && !sim_is_alive(r->owner)) {
            mmap(r->base, r->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
            memset(r->base, 0xdd, r->size);
            r->lost = 1;
        }
    pthread_mutex_unlock(&sim_lock);
}

static size_t used(machine *all, int device) {
    size_t bytes = 0;
    for (int i = 0; i < MOST_ALLOCATIONS; i++)
        if (all->allocations[i].used && all->allocations[i].device == device) bytes += all->allocations[i].size;
    return bytes;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    ENTER("cuMemAlloc", NEEDS_CONTEXT | UNSAFE_IN_CAPTURE | SYNCHRONISES);
    if (!size) return INVALID_VALUE;
    int device = sim_visible(sim_current()->device);
    machine *all = sim_machine();
    allocation *memory = NULL;
    for (int i = 0; i < MOST_ALLOCATIONS && !memory; i++)
        if (!all->allocations[i].used) memory = &all->allocations[i];
    if (!memory || used(all, device) + size > sim_memory()) return sim_release(), OUT_OF_MEMORY;
    *memory = (allocation){.used = 1, .device = device, .size = size, .serial = ++all->serial, .owner = sim_self()};
    void *base = sim_map(memory);
    if (!base) return memory->used = 0, sim_release(), OUT_OF_MEMORY;
    memset(base, 0xcd, size);  // never zeros by chance
    sim_add_range(base, size, memory);
    sim_release();
    *address = (CUdeviceptr)base;
    return SUCCESS;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
    ENTER("cuMemFree", NEEDS_CONTEXT | UNSAFE_IN_CAPTURE | SYNCHRONISES);
    range *found = sim_range(address, 1);
    if (!found || (CUdeviceptr)found->base != address || found->opened || found->is_host) return INVALID_VALUE;
    moment now = sim_now_in_context(sim_current());
    sim_wait_for(&now);
    machine *all = sim_machine();
    for (int i = 0; i < MOST_ALLOCATIONS; i++)
        if (all->allocations[i].used && all->allocations[i].serial == found->serial) all->allocations[i].freed = 1;
    sim_remove_range(found);
    sim_release();
    return SUCCESS;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER("cuMemGetInfo", NEEDS_CONTEXT);
    *total = sim_memory();
    *free_bytes = *total - used(sim_machine(), sim_visible(sim_current()->device));
    sim_release();
    return SUCCESS;
}

EXPORT CUresult cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    (void)flags;
    ENTER("cuMemHostAlloc", NEEDS_CONTEXT | UNSAFE_IN_CAPTURE | SYNCHRONISES);
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return OUT_OF_MEMORY;
    sim_add_range(base, size, NULL)->is_host = 1;
    *address = base;
    return SUCCESS;
}

EXPORT CUresult cuMemFreeHost(void *address) {
    ENTER("cuMemFreeHost", NEEDS_CONTEXT | UNSAFE_IN_CAPTURE | SYNCHRONISES);
    range *found = sim_range((CUdeviceptr)address, 1);
    if (!found || !found->is_host) return INVALID_VALUE;
    moment now = sim_now_in_context(sim_current());
    sim_wait_for(&now);
    sim_remove_range(found);
    return SUCCESS;
}

static CUresult queue(stream *on, op what) {
    if (!on) return INVALID_HANDLE;
    if (on->capturing) return SUCCESS;  // part of the graph, not executed
    sim_enqueue(on, what);
    return SUCCESS;
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes) {
    ENTER("cuMemsetD8", NEEDS_CONTEXT | UNSAFE_IN_CAPTURE);  // does not wait for device memory, as the real one
    if (!sim_range(to, bytes)) return INVALID_VALUE;
    return queue(sim_stream(NULL), (op){.kind = FILL, .to = (void *)to, .value = value, .bytes = bytes});
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, void *on) {
    ENTER("cuMemsetD8Async", NEEDS_CONTEXT);
    if (!sim_range(to, bytes)) return INVALID_VALUE;
    return queue(sim_stream(on), (op){.kind = FILL, .to = (void *)to, .value = value, .bytes = bytes});
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, void *on) {
    ENTER("cuMemcpyDtoDAsync", NEEDS_CONTEXT);
    if (!sim_range(to, bytes) || !sim_range(from, bytes)) return INVALID_VALUE;
    return queue(sim_stream(on), (op){.kind = COPY, .to = (void *)to, .from = (void *)from, .bytes = bytes});
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, void *on) {
    ENTER("cuMemcpyDtoHAsync", NEEDS_CONTEXT);
    range *host = sim_range((CUdeviceptr)to, bytes);
    if (!sim_range(from, bytes)) return INVALID_VALUE;
    CUresult result = queue(sim_stream(on), (op){.kind = COPY, .to = to, .from = (void *)from, .bytes = bytes});
    if (!result && !(host && host->is_host)) {
        moment now = sim_now(sim_stream(on));  // pageable memory: the call waits
        sim_wait_for(&now);
    }
    return result;
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
    ENTER("cuMemcpyHtoD", NEEDS_CONTEXT | UNSAFE_IN_CAPTURE | SYNCHRONISES);
    if (!sim_range(to, bytes)) return INVALID_VALUE;
    // What is pageable is staged, and under way when the call returns.
    moment now = sim_now(sim_stream(NULL));
    sim_wait_for(&now);
    void *staged = memcpy(malloc(bytes), from, bytes);
    return queue(sim_stream(NULL), (op){.kind = COPY, .to = (void *)to, .from = staged, .bytes = bytes, .staged = staged});
}

EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    ENTER("cuMemcpyDtoH", NEEDS_CONTEXT | UNSAFE_IN_CAPTURE | SYNCHRONISES);
    if (!sim_range(from, bytes)) return INVALID_VALUE;
    CUresult result = queue(sim_stream(NULL), (op){.kind = COPY, .to = to, .from = (void *)from, .bytes = bytes});
    moment now = sim_now(sim_stream(NULL));
    sim_wait_for(&now);
    return result;
}

// For tests: the ordinal of the device whose memory a pointer is to, as torch knows it of its own tensors; -1: none.
EXPORT int simDeviceOf(CUdeviceptr address) {
    range *found = sim_range(address, 1);
    if (!found || found->is_host) return -1;
    for (int ordinal = 0; sim_visible(ordinal) >= 0; ordinal++)
        if (sim_visible(ordinal) == found->device) return ordinal;
    return -1;
}
