// Streams: each has a queue and a thread that does what is in it, late; events; captures.
#define _GNU_SOURCE
#include "sim.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

pthread_mutex_t sim_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t sim_changed = PTHREAD_COND_INITIALIZER;

static int done(const moment *when) {
    for (int i = 0; i < when->count; i++)
        if (when->item[i].of->completed < when->item[i].number) return 0;
    return 1;
}

static void add(moment *when, stream *of) {
    if (of->completed == of->enqueued || when->count == MOST_TARGETS) return;
    when->item[when->count].of = of;
    when->item[when->count++].number = of->enqueued;
}

static void touch(context *of, const op *what) {
    range *to = sim_range((CUdeviceptr)what->to, what->bytes);
    if (to && to->lost) of->sticky = ILLEGAL_ADDRESS;
}

static void *execute(void *argument) {
    stream *self = argument;
    unsigned latency_us = sim_setting("SIM_CUDA_LATENCY_US", 100);
    pthread_mutex_lock(&sim_lock);
    for (;;) {
        while (!self->head) pthread_cond_wait(&sim_changed, &sim_lock);
        op *next = self->head;
        while (next->kind == WAIT && !done(&next->until)) pthread_cond_wait(&sim_changed, &sim_lock);
        pthread_mutex_unlock(&sim_lock);
        if (next->kind == DELAY) usleep(next->delay_us);
        else if (next->kind != WAIT) usleep(latency_us);
        pthread_mutex_lock(&sim_lock);
        if (next->kind == COPY) memcpy(next->to, next->from, next->bytes);
        if (next->kind == FILL) memset(next->to, next->value, next->bytes);
        if (next->kind == COPY || next->kind == FILL) touch(self->context, next);
        self->head = next->next;
        if (!self->head) self->tail = NULL;
        free(next->staged);
        free(next);
        self->completed++;
        pthread_cond_broadcast(&sim_changed);
    }
    return NULL;
}

static void append(stream *on, op what) {
    op *made = malloc(sizeof *made);
    *made = what;
    made->next = NULL;
    if (on->tail) on->tail->next = made;
    else on->head = made;
    on->tail = made;
    on->enqueued++;
    if (!on->started) {
        on->started = 1;
        pthread_create(&on->thread, NULL, execute, on);
        pthread_detach(on->thread);
    }
    pthread_cond_broadcast(&sim_changed);
}

// The null stream waits for all blocking streams, and they for it.
void sim_enqueue(stream *on, op what) {
    pthread_mutex_lock(&sim_lock);
    op before = {.kind = WAIT};
    if (on->is_null) {
        for (stream *s = on->context->streams; s; s = s->next)
            if (s->is_blocking) add(&before.until, s);
    } else if (on->is_blocking) {
        add(&before.until, &on->context->null_stream);
    }
    if (before.until.count) append(on, before);
    append(on, what);
    pthread_mutex_unlock(&sim_lock);
}

int sim_is_done(const moment *when) {
    pthread_mutex_lock(&sim_lock);
    int result = done(when);
    pthread_mutex_unlock(&sim_lock);
    return result;
}

void sim_wait_for(const moment *when) {
    pthread_mutex_lock(&sim_lock);
    while (!done(when)) pthread_cond_wait(&sim_changed, &sim_lock);
    pthread_mutex_unlock(&sim_lock);
}

moment sim_now(stream *of) {
    moment now = {0};
    pthread_mutex_lock(&sim_lock);
    add(&now, of);
    // What the null stream would wait for, had anything been queued on it.
    for (stream *s = of->is_null ? of->context->streams : NULL; s; s = s->next)
        if (s->is_blocking) add(&now, s);
    if (!of->is_null && of->is_blocking) add(&now, &of->context->null_stream);
    pthread_mutex_unlock(&sim_lock);
    return now;
}

moment sim_now_in_context(context *of) {
    moment now = {0};
    pthread_mutex_lock(&sim_lock);
    add(&now, &of->null_stream);
    for (stream *s = of->streams; s; s = s->next) add(&now, s);
    pthread_mutex_unlock(&sim_lock);
    return now;
}

void sim_invalidate_captures(context *of) {
    for (stream *s = of->streams; s; s = s->next)
        if (s->capturing) s->capturing = 2;
}

stream *sim_stream(void *handle) {
    // 1 and 2 are CU_STREAM_LEGACY and CU_STREAM_PER_THREAD.
    if ((uintptr_t)handle <= 2) return &sim_current()->null_stream;
    for (stream *s = sim_current()->streams; s; s = s->next)
        if (s == handle) return s;
    return NULL;
}

EXPORT CUresult cuStreamCreate(stream **made, unsigned flags) {
    ENTER("cuStreamCreate", NEEDS_CONTEXT);
    stream *created = calloc(1, sizeof *created);
    created->context = sim_current();
    created->is_blocking = !(flags & 1);  // CU_STREAM_NON_BLOCKING
    pthread_mutex_lock(&sim_lock);
    created->next = created->context->streams;
    created->context->streams = created;
    pthread_mutex_unlock(&sim_lock);
    *made = created;
    return SUCCESS;
}

EXPORT CUresult cuStreamGetCtx(void *handle, context **found) {
    ENTER("cuStreamGetCtx", ANY);
    *found = (uintptr_t)handle <= 2 ? sim_current() : sim_context_of(handle);
    if (!*found) return (uintptr_t)handle <= 2 ? INVALID_CONTEXT : INVALID_HANDLE;
    return SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(void *handle) {
    ENTER("cuStreamSynchronize", NEEDS_CONTEXT | UNSAFE_IN_CAPTURE | SYNCHRONISES);
    stream *of = sim_stream(handle);
    if (!of) return INVALID_HANDLE;
    moment now = sim_now(of);
    sim_wait_for(&now);
    return sim_current()->sticky;
}

EXPORT CUresult cuCtxSynchronize(void) {
    ENTER("cuCtxSynchronize", NEEDS_CONTEXT | UNSAFE_IN_CAPTURE | SYNCHRONISES);
    moment now = sim_now_in_context(sim_current());
    sim_wait_for(&now);
    return sim_current()->sticky;
}

EXPORT CUresult cuStreamWaitEvent(void *handle, event *for_event, unsigned flags) {
    (void)flags;
    ENTER("cuStreamWaitEvent", NEEDS_CONTEXT);
    stream *on = sim_stream(handle);
    if (!on || !for_event) return INVALID_HANDLE;
    sim_enqueue(on, (op){.kind = WAIT, .until = for_event->recorded});
    return SUCCESS;
}

EXPORT CUresult cuStreamBeginCapture_v2(void *handle, int mode) {
    ENTER("cuStreamBeginCapture", NEEDS_CONTEXT);
    stream *on = sim_stream(handle);
    if (!on || on->is_null || on->capturing) return CAPTURE_UNSUPPORTED;
    on->capture_mode = mode;
    on->captured_by = pthread_self();
    on->capturing = 1;
    return SUCCESS;
}

EXPORT CUresult cuStreamEndCapture(void *handle, void **graph) {
    ENTER("cuStreamEndCapture", NEEDS_CONTEXT);
    stream *on = sim_stream(handle);
    if (!on || !on->capturing) return INVALID_VALUE;
    int was = on->capturing;
    on->capturing = 0;
    *graph = NULL;
    return was == 2 ? CAPTURE_INVALIDATED : SUCCESS;
}

EXPORT CUresult cuStreamIsCapturing(void *handle, int *status) {
    ENTER("cuStreamIsCapturing", NEEDS_CONTEXT);
    stream *on = sim_stream(handle);
    if (!on) return INVALID_HANDLE;
    if (on->is_null)
        for (stream *s = on->context->streams; s; s = s->next)
            if (s->is_blocking && s->capturing) return CAPTURE_IMPLICIT;
    *status = on->capturing;
    return SUCCESS;
}

EXPORT CUresult cuEventCreate(event **made, unsigned flags) {
    (void)flags;
    ENTER("cuEventCreate", NEEDS_CONTEXT);
    *made = calloc(1, sizeof **made);
    (*made)->context = sim_current();
    return SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(event *which) {
    ENTER("cuEventDestroy", NEEDS_CONTEXT);
    memset(which, 0xee, sizeof *which);  // used again, it will not pass for an event
    free(which);
    return SUCCESS;
}

EXPORT CUresult cuEventRecord(event *which, void *handle) {
    ENTER("cuEventRecord", NEEDS_CONTEXT);
    stream *of = sim_stream(handle);
    if (!of || !which || which->context != of->context) return INVALID_HANDLE;
    which->captured = of->capturing;
    which->recorded = sim_now(of);
    return SUCCESS;
}

EXPORT CUresult cuCtxRecordEvent(context *of, event *which) {
    ENTER("cuCtxRecordEvent", ANY);
    if (!which || which->context != of) return INVALID_HANDLE;
    for (stream *s = of->streams; s; s = s->next)
        if (s->capturing) {
            sim_invalidate_captures(of);
            return CAPTURE_UNSUPPORTED;
        }
    which->captured = 0;
    which->recorded = sim_now_in_context(of);
    return SUCCESS;
}

EXPORT CUresult cuEventQuery(event *which) {
    ENTER("cuEventQuery", NEEDS_CONTEXT | UNSAFE_IN_CAPTURE);
    if (!which) return INVALID_HANDLE;
    if (which->captured) {
        sim_invalidate_captures(which->context);
        return CAPTURED_EVENT;
    }
    return sim_is_done(&which->recorded) ? sim_current()->sticky : NOT_READY;
}

EXPORT CUresult cuEventSynchronize(event *which) {
    ENTER("cuEventSynchronize", NEEDS_CONTEXT | UNSAFE_IN_CAPTURE | SYNCHRONISES);
    sim_wait_for(&which->recorded);
    return sim_current()->sticky;
}

// For tests: a kernel that takes so long, and whether a stream captures, as torch knows it of its current one.

EXPORT CUresult simDelay(void *handle, unsigned microseconds) {
    ENTER("simDelay", NEEDS_CONTEXT);
    stream *on = sim_stream(handle);
    if (!on) return INVALID_HANDLE;
    sim_enqueue(on, (op){.kind = DELAY, .delay_us = microseconds});
    return SUCCESS;
}

EXPORT int simIsCapturing(void) {
    context *current = sim_current();
    for (stream *s = current ? current->streams : NULL; s; s = s->next)
        if (s->capturing && pthread_equal(s->captured_by, pthread_self())) return 1;
    return 0;
}
