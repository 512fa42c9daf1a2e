// What happened on the stand-in device, counted by kind and name, and if requested in order (record.c). Includes nothing
// of CUDA, because generated entry points have other signatures than its headers declare.
#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct counter {
    const char *kind; // one of the kinds below
    const char *name;
    bool is_launch; // kind is LAUNCH or CAPTURED
    _Atomic long count;
};

#define LAUNCH "launch"         // of a kernel, a matrix product, a memset or a whole CUDA graph by the host
#define CAPTURED "captured"     // a launch into a CUDA graph; replays count as one launch of the graph
#define PLACE "place"           // a launch, under the number of the device that was current
#define WAIT "wait"             // of the host for the device, a stream or an event
#define PAGEABLE "pageable"     // a copy to or from pageable memory, for which the host waits unless it is small
#define COPY "copy"             // between host and device, or on the device
#define COLLECTIVE "collective" // of NCCL
#define ORDER "order"           // an event recorded, or waited for by a stream
#define ALLOCATION "allocation" // of device or pinned memory, which may wait for the device
#define REFUSED "refused"       // a launch beyond the limits of the device, a call that a capture does not allow
#define OTHER "other"           // entry points that return success and do nothing

// Return the counter of (kind, name), made at the first call. `name` is copied.
struct counter *counter_of(const char *kind, const char *name);
// Count one occurrence; it is logged with its stream and amount (bytes, or what the kind says) while logging is on.
void record(struct counter *counter, const void *stream, uint64_t amount);
// Count a wait, and report it to the callback, which collects the Python stack.
void record_wait(struct counter *counter, const void *stream, uint64_t amount);
// Launches so far, in graphs or not.
uint64_t launches_so_far(void);

// Count under constant names: the counter is looked up once per call site.
#define RECORD(kind, name, stream, amount)                                                                             \
    do {                                                                                                               \
        static struct counter *counter_;                                                                               \
        if (!counter_) counter_ = counter_of(kind, name);                                                              \
        record(counter_, stream, amount);                                                                              \
    } while (0)
#define RECORD_WAIT(kind, name, stream, amount)                                                                        \
    do {                                                                                                               \
        static struct counter *counter_;                                                                               \
        if (!counter_) counter_ = counter_of(kind, name);                                                              \
        record_wait(counter_, stream, amount);                                                                         \
    } while (0)

// Count and print what a real device refuses.
void refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Count a launch on `stream`: of the host, or into the graph that the stream is captured into (streams.c).
void record_launch(struct counter *launch, struct counter *in_graph, const void *stream);
#define LAUNCHED(name, stream)                                                                                         \
    do {                                                                                                               \
        static struct counter *launch_, *in_graph_;                                                                    \
        if (!launch_) in_graph_ = counter_of(CAPTURED, name), launch_ = counter_of(LAUNCH, name);                      \
        record_launch(launch_, in_graph_, stream);                                                                     \
    } while (0)
