// What cuBLAS, cuDNN and NCCL must answer beyond success. All their other entry points are generated (build.py).
// Arguments that are not read are left out: the C calling convention allows it.
#include "pretend.h"

#include <stdlib.h>
#include <string.h>

// cuBLAS

int cublasGetMathMode(void *handle, int *mode) { return *mode = 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0; }
int cublasGetVersion_v2(void *handle, int *version) { return *version = 130100, 0; }
size_t cublasLtGetVersion(void) { return 130100; }
size_t cublasLtGetCudartVersion(void) { return CUDART_VERSION; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int requested, void *results, int *found) {
    memset(results, 0, 96); // one cublasLtMatmulHeuristicResult_t: no workspace, state 0 is success
    return *found = 1, 0;
}
int cublasLtMatmul(void *handle, void *operation, void *alpha, void *a, void *a_layout, void *b, void *b_layout,
                   void *beta, void *c, void *c_layout, void *d, void *d_layout, void *algorithm, void *workspace,
                   size_t workspace_bytes, void *stream) {
    LAUNCHED("cublasLtMatmul", stream);
    return 0;
}
// A handle: cublasSetStream notes the stream for its launches.
int cublasCreate_v2(void ***handle) { return *handle = calloc(512, 8), 0; }
int cublasSetStream_v2(void **handle, void *stream) { return handle[0] = stream, 0; }
int cublasGetStream_v2(void **handle, void **stream) { return *stream = handle[0], 0; }

// cuDNN: PyTorch's attention builds a graph of descriptors, asks for plans and executes one.

size_t cudnnGetVersion(void) { return CUDNN; } // from build.py
size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }
const char *cudnnGetErrorString(int status) { return status ? "CUDNN_STATUS_OF_THE_STAND_IN" : "CUDNN_STATUS_SUCCESS"; }
void cudnnGetLastErrorString(char *text, size_t length) {
    if (length) text[0] = 0;
}
int cudnnGetProperty(int type, int *value) {
    return *value = type == 0 ? CUDNN / 10000 : type == 1 ? CUDNN / 100 % 100 : CUDNN % 100, 0;
}
int cudnnCreate(void ***handle) { return *handle = calloc(512, 8), 0; }
int cudnnSetStream(void **handle, void *stream) { return handle[0] = stream, 0; }
int cudnnGetStream(void **handle, void **stream) { return *stream = handle[0], 0; }
int cudnnBackendCreateDescriptor(int type, void **descriptor) { return *descriptor = calloc(1, 4096), 0; }
// Types of attributes as in cudnn_graph.h: 0 is a handle, 3 int64 (here the workspace: 0 bytes), 15 a descriptor.
int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t requested, int64_t *count, void *values) {
    if (count) *count = 1;
    if (!values || requested <= 0 || type == 0 || type == 15) return 0;
    if (type == 3) *(int64_t *)values = 0;
    else *(int *)values = 0;
    return 0;
}
int cudnnBackendExecute(void **handle, void *plan, void *pack) {
    LAUNCHED("cudnnBackendExecute", handle[0]);
    return 0;
}

// NCCL: every collective has the result of a group whose other members have the same values.

struct communicator {
    int ranks, rank;
    char rest[65536]; // NCCL's own structure is larger; PyTorch never reads it
};

static const size_t element_bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; // by ncclDataType_t

static int communicator(struct communicator **result, int ranks, int rank) {
    *result = calloc(1, sizeof **result);
    (*result)->ranks = ranks, (*result)->rank = rank;
    return 0;
}

int ncclGetVersion(int *version) { return *version = 23007, 0; }
int ncclGetUniqueId(void *id) { return memset(id, 7, 128), 0; }
struct unique_id {
    char bytes[128];
};
int ncclCommInitRank(struct communicator **result, int ranks, struct unique_id id, int rank) {
    return communicator(result, ranks, rank);
}
int ncclCommInitRankConfig(struct communicator **result, int ranks, struct unique_id id, int rank, void *config) {
    return communicator(result, ranks, rank);
}
int ncclCommInitRankScalable(struct communicator **result, int ranks, int rank, int ids, void *id, void *config) {
    return communicator(result, ranks, rank);
}
int ncclCommSplit(struct communicator *whole, int color, int key, struct communicator **result, void *config) {
    return communicator(result, whole->ranks, whole->rank);
}
int ncclCommCount(struct communicator *group, int *ranks) { return *ranks = group->ranks, 0; }
int ncclCommUserRank(struct communicator *group, int *rank) { return *rank = group->rank, 0; }
int ncclCommCuDevice(struct communicator *group, int *index) { return *index = 0; }
int ncclCommGetAsyncError(void *group, int *error) { return *error = 0; }
const char *ncclGetErrorString(int error) { return error ? "error of the stand-in device" : "no error"; }
const char *ncclGetLastError(void *group) { return ""; }

int ncclAllReduce(void *from, void *to, size_t count, int type, int operation, void *group, void *stream) {
    RECORD(COLLECTIVE, "ncclAllReduce", stream, count * element_bytes[type]);
    if (from != to) copy_bytes(to, from, count * element_bytes[type]);
    return 0;
}
int ncclReduce(void *from, void *to, size_t count, int type, int operation, int root, void *group, void *stream) {
    RECORD(COLLECTIVE, "ncclReduce", stream, count * element_bytes[type]);
    if (from != to) copy_bytes(to, from, count * element_bytes[type]);
    return 0;
}
int ncclBroadcast(void *from, void *to, size_t count, int type, int root, void *group, void *stream) {
    RECORD(COLLECTIVE, "ncclBroadcast", stream, count * element_bytes[type]);
    if (from != to) copy_bytes(to, from, count * element_bytes[type]);
    return 0;
}
int ncclBcast(void *buffer, size_t count, int type, int root, void *group, void *stream) {
    RECORD(COLLECTIVE, "ncclBroadcast", stream, count * element_bytes[type]);
    return 0;
}
// Amounts are those of the whole group: what every rank has after a gather, and before a scatter.
int ncclAllGather(void *from, char *to, size_t count, int type, struct communicator *group, void *stream) {
    size_t bytes = count * element_bytes[type];
    RECORD(COLLECTIVE, "ncclAllGather", stream, bytes * group->ranks);
    for (int rank = 0; rank < group->ranks; rank++)
        if (to + rank * bytes != from) copy_bytes(to + rank * bytes, from, bytes);
    return 0;
}
int ncclReduceScatter(char *from, void *to, size_t count, int type, int operation, struct communicator *group,
                      void *stream) {
    size_t bytes = count * element_bytes[type];
    RECORD(COLLECTIVE, "ncclReduceScatter", stream, bytes * group->ranks);
    if (from + group->rank * bytes != to) copy_bytes(to, from + group->rank * bytes, bytes);
    return 0;
}
int ncclSend(void *from, size_t count, int type, int peer, void *group, void *stream) {
    RECORD(COLLECTIVE, "ncclSend", stream, count * element_bytes[type]);
    return 0;
}
int ncclRecv(void *to, size_t count, int type, int peer, void *group, void *stream) {
    RECORD(COLLECTIVE, "ncclRecv", stream, count * element_bytes[type]);
    return 0;
}
int ncclAlltoAll(void *from, void *to, size_t count, int type, struct communicator *group, void *stream) {
    RECORD(COLLECTIVE, "ncclAlltoAll", stream, count * element_bytes[type] * group->ranks);
    copy_bytes(to, from, count * element_bytes[type] * group->ranks);
    return 0;
}
