// Streams, events, waits of the host, and CUDA graphs: capture, instantiation and replay.
#include "pretend.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

struct graph {
    uint64_t launches; // captured
    uint64_t id;
};

struct stream {
    int priority;
    struct graph *graph; // being captured, or NULL
};

struct pretend_event {
    uint64_t launches;   // that were issued before the event was recorded
    struct graph *graph; // that was being captured then
    bool recorded;
};

// The streams that have numbers for names: the legacy stream (NULL or 1) and the stream of the thread (2).
static struct stream numbered[3];
#define STREAMS 4096
static struct stream *streams[STREAMS];
static _Atomic size_t stream_count;
static _Atomic int captures; // in progress
static _Atomic uint64_t graph_count;
static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;

static struct stream *stream_at(const void *handle) {
    return (uintptr_t)handle < 3 ? &numbered[(uintptr_t)handle] : (struct stream *)handle;
}

bool captured(const void *stream) { return captures && stream_at(stream)->graph; }

void record_launch(struct counter *launch, struct counter *in_graph, const void *stream) {
    struct graph *graph = captures ? stream_at(stream)->graph : NULL;
    if (graph) graph->launches++;
    else if (captures) refuse("a launch that a capture in progress does not contain: %s", launch->name); // a replay lacks it
    record(graph ? in_graph : launch, stream, 0);
    static struct counter *places[GPUS];
    int device = current_device();
    if (!places[device]) places[device] = counter_of(PLACE, (char[]){(char)('0' + device), 0});
    record(places[device], stream, 0);
}

cudaError_t forbid_in_capture(const char *call, const void *stream, bool whole_device) {
    if (!captures || (!whole_device && !stream_at(stream)->graph)) return cudaSuccess;
    refuse("%s while a CUDA graph is being captured", call);
    return cudaErrorStreamCaptureUnsupported;
}

static cudaError_t new_stream(cudaStream_t *handle, int priority) {
    struct stream *stream = calloc(1, sizeof *stream);
    stream->priority = priority;
    pthread_mutex_lock(&streams_lock);
    if (stream_count < STREAMS) streams[stream_count++] = stream;
    pthread_mutex_unlock(&streams_lock);
    return *handle = (cudaStream_t)stream, cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *handle) { return new_stream(handle, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) { return new_stream(handle, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
    return new_stream(handle, priority);
}
cudaError_t cudaStreamDestroy(cudaStream_t handle) { return cudaSuccess; } // kept: the end of a capture visits all
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
    return *priority = stream_at(handle)->priority, cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) { return forbid_in_capture("cudaStreamQuery", handle, false); }
cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void *data, unsigned flags) {
    return function(handle, cudaSuccess, data), cudaSuccess;
}

// Waits of the host.

cudaError_t cudaDeviceSynchronize(void) {
    cudaError_t error = forbid_in_capture("cudaDeviceSynchronize", NULL, true);
    if (!error) RECORD_WAIT(WAIT, "cudaDeviceSynchronize", NULL, 0);
    return error;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    cudaError_t error = forbid_in_capture("cudaStreamSynchronize", handle, false);
    if (!error) RECORD_WAIT(WAIT, "cudaStreamSynchronize", handle, 0);
    return error;
}
CUresult cuStreamSynchronize(CUstream handle) { return (CUresult)cudaStreamSynchronize(handle); }
CUresult cuCtxSynchronize(void) { return (CUresult)cudaDeviceSynchronize(); }

// Events.

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags) {
    return *handle = (cudaEvent_t)calloc(1, sizeof(struct pretend_event)), cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *handle) { return cudaEventCreateWithFlags(handle, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t handle) { return free(handle), cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) {
    struct pretend_event *event = (struct pretend_event *)handle;
    event->launches = launches_so_far(), event->graph = stream_at(stream)->graph, event->recorded = true;
    RECORD(ORDER, "event recorded", stream, (uint64_t)handle);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
    return cudaEventRecordWithFlags(handle, stream, 0);
}
cudaError_t cudaEventQuery(cudaEvent_t handle) { return cudaSuccess; }
// The amount is the number of launches issued since the event: a wait for what was issued long ago is short.
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    RECORD(ORDER, "host waits for event", NULL, (uint64_t)handle);
    RECORD_WAIT(WAIT, "cudaEventSynchronize", NULL, launches_so_far() - ((struct pretend_event *)handle)->launches);
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    return *milliseconds = 1.0f, cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t awaited, unsigned flags) {
    const struct pretend_event *event = (struct pretend_event *)awaited;
    struct graph *graph = event->graph, *own = captures ? stream_at(handle)->graph : NULL;
    if (own && event->recorded && graph != own) {
        refuse("a wait of a captured stream for work outside of the capture");
        return cudaErrorStreamCaptureIsolation;
    }
    if (captures && graph) stream_at(handle)->graph = graph; // the stream joins the capture
    RECORD(ORDER, "stream waits for event", handle, (uint64_t)awaited);
    return cudaSuccess;
}

// CUDA graphs. A captured launch is counted as such; a replay is one launch by the host.

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    if ((uintptr_t)handle < 2) return refuse("capture of the legacy stream"), cudaErrorStreamCaptureUnsupported;
    struct graph *graph = calloc(1, sizeof *graph);
    graph->id = ++graph_count;
    stream_at(handle)->graph = graph;
    captures++;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *result) {
    struct graph *graph = stream_at(handle)->graph;
    if (!graph) return *result = NULL, cudaErrorIllegalState;
    for (size_t index = 0; index < 3; index++)
        if (numbered[index].graph == graph) numbered[index].graph = NULL;
    for (size_t index = 0; index < stream_count; index++)
        if (streams[index]->graph == graph) streams[index]->graph = NULL;
    captures--;
    return *result = (cudaGraph_t)graph, cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    *status = captured(handle) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    struct graph *current = captured(handle) ? stream_at(handle)->graph : NULL;
    *status = current ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (id) *id = current ? current->id : 0;
    if (graph) *graph = (cudaGraph_t)current;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t handle, cudaGraphNode_t *nodes,
                                                const cudaGraphEdgeData *edges, size_t count, unsigned flags) {
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    return *count = ((struct graph *)graph)->launches, cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    struct graph *copy = malloc(sizeof *copy);
    *copy = *(struct graph *)graph;
    return *executable = (cudaGraphExec_t)copy, cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    RECORD(LAUNCH, "CUDA graph", stream, ((struct graph *)executable)->launches);
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return free(graph), cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return free(executable), cudaSuccess; }
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count, unsigned flags) {
    return cudaSuccess;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *pointer, cudaHostFn_t destroy, unsigned references,
                                 unsigned flags) {
    return *object = (cudaUserObject_t)malloc(16), cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count) { return cudaSuccess; }
