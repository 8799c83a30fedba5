// The simulated machine: one file that all processes map, and a file for each allocation of device memory.
#define _GNU_SOURCE
#include "sim.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static machine *mapped;
static int state_fd = -1;
static pthread_mutex_t in_process = PTHREAD_MUTEX_INITIALIZER;

static void path_of(char *path, size_t size, const char *name, uint64_t number) {
    const char *directory = getenv("SIM_CUDA_DIR");
    if (!directory) {
        fprintf(stderr, "libcuda (simulated): SIM_CUDA_DIR is not set\n");
        abort();
    }
    snprintf(path, size, "%s/%s-%llu", directory, name, (unsigned long long)number);
}

process sim_self(void) {
    static __thread process self;
    if (self.pid != getpid()) {
        self.pid = getpid();
        self.started = 0;
        self.pid_namespace = sim_namespace("pid");
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/stat", self.pid);
        FILE *file = fopen(path, "r");
        if (file) {
            if (fscanf(file, "%*d (%*[^)]) %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %lu",
                       &self.started) != 1)
                self.started = 0;
            fclose(file);
        }
    }
    return self;
}

int sim_is_alive(process who) {
    char path[64], state;
    unsigned long started;
    if (!who.pid) return 0;
    if (who.pid_namespace != sim_self().pid_namespace) return 1;  // its pid means nothing here
    snprintf(path, sizeof path, "/proc/%d/stat", who.pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    int read = fscanf(file, "%*d (%*[^)]) %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %lu",
                      &state, &started);
    fclose(file);
    return read == 2 && state != 'Z' && state != 'X' && started == who.started;
}

// Memory goes with its owner, or, if the driver pins it, with the last process that has it mapped.
static void reap(void) {
    int pinned = !getenv("SIM_CUDA_EXPORTER_GONE") || strcmp(getenv("SIM_CUDA_EXPORTER_GONE"), "unmap");
    for (int i = 0; i < MOST_ALLOCATIONS; i++) {
        allocation *memory = &mapped->allocations[i];
        if (!memory->used) continue;
        int in_use = !memory->freed && sim_is_alive(memory->owner);
        for (int n = 0; n < MOST_IMPORTERS; n++) {
            if (memory->importers[n].pid && !sim_is_alive(memory->importers[n])) memory->importers[n].pid = 0;
            if (memory->importers[n].pid && pinned) in_use = 1;
        }
        if (in_use) continue;
        char path[512];
        path_of(path, sizeof path, "memory", memory->serial);
        unlink(path);
        memset(memory, 0, sizeof *memory);
    }
}

machine *sim_machine(void) {
    pthread_mutex_lock(&in_process);
    if (!mapped) {
        char path[512];
        path_of(path, sizeof path, "machine", 0);
        state_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (state_fd < 0 || ftruncate(state_fd, sizeof *mapped)) {
            perror("libcuda (simulated): SIM_CUDA_DIR");
            abort();
        }
        mapped = mmap(NULL, sizeof *mapped, PROT_READ | PROT_WRITE, MAP_SHARED, state_fd, 0);
    }
    flock(state_fd, LOCK_EX);
    reap();
    return mapped;
}

void sim_release(void) {
    flock(state_fd, LOCK_UN);
    pthread_mutex_unlock(&in_process);
}

void *sim_map(const allocation *memory) {
    char path[512];
    path_of(path, sizeof path, "memory", memory->serial);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    struct stat found;
    if (fd < 0 || fstat(fd, &found)) return NULL;
    if (!found.st_size && ftruncate(fd, memory->size)) return close(fd), NULL;
    void *base = mmap(NULL, memory->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return base == MAP_FAILED ? NULL : base;
}

uint64_t sim_namespace(const char *kind) {
    char path[32];
    struct stat found;
    snprintf(path, sizeof path, "/proc/self/ns/%s", kind);
    return stat(path, &found) ? 0 : found.st_ino;
}
