// Handles for device memory that other processes open.
#define _GNU_SOURCE
#include "sim.h"

#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <sys/mman.h>

static void make_handle(unsigned char *handle, const allocation *memory, int number) {
    memset(handle, 0, 64);
    // Without a serial number: memory that is freed and allocated anew can get the bytes it had before.
    // SIM_CUDA_HANDLES=repeat leaves out the pid, too, as two containers with equal pids would see it.
    const char *how = getenv("SIM_CUDA_HANDLES");
    int pid = how && !strcmp(how, "repeat") ? 1 : memory->owner.pid;
    snprintf((char *)handle, 64, "sim-ipc %d %d %d %llu", memory->device, pid, number, (unsigned long long)memory->size);
}

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    ENTER("cuIpcGetMemHandle", NEEDS_CONTEXT | UNSAFE_IN_CAPTURE);
    range *found = sim_range(address, 1);
    if (!found || found->is_host || found->opened) return INVALID_VALUE;
    if (!sim_setting("SIM_CUDA_IPC", 1)) return NOT_SUPPORTED;
    machine *all = sim_machine();
    int number = 0;
    for (int i = 0; i < MOST_ALLOCATIONS; i++) {
        allocation *memory = &all->allocations[i];
        if (!memory->used || memory->owner.pid != found->owner.pid) continue;
        if (memory->serial == found->serial) {
            make_handle(memory->handle, memory, number);
            memory->pid_namespace = sim_namespace("pid");
            memory->ipc_namespace = sim_namespace("ipc");
            memcpy(handle->reserved, memory->handle, 64);
            break;
        }
        if (memory->handle[0]) number++;
    }
    sim_release();
    return SUCCESS;
}

static allocation *of_handle(machine *all, const CUipcMemHandle *handle) {
    allocation *newest = NULL;
    for (int i = 0; i < MOST_ALLOCATIONS; i++) {
        allocation *memory = &all->allocations[i];
        if (memory->used && !memory->freed && sim_is_alive(memory->owner) && !memcmp(memory->handle, handle->reserved, 64))
            if (!newest || memory->serial > newest->serial) newest = memory;
    }
    return newest;
}

static CUresult import(machine *all, const CUipcMemHandle *handle, CUdeviceptr *address) {
    allocation *memory = of_handle(all, handle);
    if (!memory) return INVALID_VALUE;
    // The exporting process itself; a process with the same pid in another namespace looks like it.
    if (memory->owner.pid == sim_self().pid || sim_setting("SIM_CUDA_SAME_PID", 0)) return INVALID_CONTEXT;
    if (memory->pid_namespace != sim_namespace("pid") || memory->ipc_namespace != sim_namespace("ipc"))
        return INVALID_CONTEXT;
    if (memory->device != sim_visible(sim_current()->device)) return INVALID_DEVICE;  // no peer access here
    for (range *r = sim_ranges; r; r = r->next)
        if (r->opened && r->serial == memory->serial) {
            r->opened++;
            *address = (CUdeviceptr)r->base;
            return SUCCESS;
        }
    int row = 0;
    while (row < MOST_IMPORTERS && memory->importers[row].pid) row++;
    if (row == MOST_IMPORTERS) return OUT_OF_MEMORY;
    void *base = sim_map(memory);
    if (!base) return OUT_OF_MEMORY;
    memory->importers[row] = sim_self();
    sim_add_range(base, memory->size, memory)->opened = 1;
    *address = (CUdeviceptr)base;
    return SUCCESS;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags) {
    ENTER("cuIpcOpenMemHandle", NEEDS_CONTEXT | UNSAFE_IN_CAPTURE | SYNCHRONISES);
    if (flags != 1) return INVALID_VALUE;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    machine *all = sim_machine();
    CUresult result = import(all, &handle, address);
    sim_release();
    return result;
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER("cuIpcCloseMemHandle", NEEDS_CONTEXT | UNSAFE_IN_CAPTURE | SYNCHRONISES);
    range *found = sim_range(address, 1);
    if (!found || !found->opened || (CUdeviceptr)found->base != address) return INVALID_VALUE;
    moment now = sim_now_in_context(sim_current());
    sim_wait_for(&now);
    if (--found->opened) return SUCCESS;
    machine *all = sim_machine();
    for (int i = 0; i < MOST_ALLOCATIONS; i++)
        if (all->allocations[i].used && all->allocations[i].serial == found->serial)
            for (int n = 0; n < MOST_IMPORTERS; n++)
                if (all->allocations[i].importers[n].pid == sim_self().pid) all->allocations[i].importers[n].pid = 0;
    sim_remove_range(found);
    sim_release();
    return SUCCESS;
}

// For tests: bytes that are allocated on a physical device, and mappings that this process has open.

EXPORT unsigned long long simAllocated(int device) {
    machine *all = sim_machine();
    unsigned long long bytes = 0;
    for (int i = 0; i < MOST_ALLOCATIONS; i++)
        if (all->allocations[i].used && all->allocations[i].device == device) bytes += all->allocations[i].size;
    sim_release();
    return bytes;
}

EXPORT int simOpenMappings(void) {
    int count = 0;
    for (range *r = sim_ranges; r; r = r->next) count += r->opened;
    return count;
}
