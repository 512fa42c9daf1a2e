// Memory and copies. Device memory is host memory that is only committed when written: copies are real, so tensors that
// were copied have their values, but more than LARGE bytes at once are not written to the device (a model would fill the
// host's memory, and what kernels write is missing anyway). Untouched device memory reads as zeros, and so does a scalar
// that a kernel may have written: the host then takes the same branches in every run.
#include "pretend.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define LARGE (4u << 20)
#define SCALAR 16 // bytes
#define WRITES 256
#define ALLOCATIONS (1 << 16)
#define PAGE 4096ull

enum place { PAGEABLE_HOST, PINNED_HOST, REGISTERED_HOST, ON_DEVICE };

struct allocation {
    char *start; // NULL: the slot is free
    size_t bytes;
    enum place place;
};

static struct allocation allocations[ALLOCATIONS];
static size_t used_slots;
static size_t device_bytes;
static pthread_mutex_t allocations_lock = PTHREAD_MUTEX_INITIALIZER;

static void remember(void *start, size_t bytes, enum place place) {
    pthread_mutex_lock(&allocations_lock);
    size_t slot = 0;
    while (slot < used_slots && allocations[slot].start) slot++;
    if (slot == ALLOCATIONS) {
        fprintf(stderr, "pretend: more than %d allocations; raise ALLOCATIONS in memory.c\n", ALLOCATIONS);
        abort();
    }
    if (slot == used_slots) used_slots++;
    allocations[slot] = (struct allocation){start, bytes, place};
    if (place == ON_DEVICE) device_bytes += bytes;
    pthread_mutex_unlock(&allocations_lock);
}

static void forget(void *start) {
    pthread_mutex_lock(&allocations_lock);
    for (size_t slot = 0; slot < used_slots; slot++) {
        struct allocation *found = &allocations[slot];
        if (found->start != start) continue;
        if (found->place != REGISTERED_HOST) munmap(start, found->bytes);
        if (found->place == ON_DEVICE) device_bytes -= found->bytes;
        found->start = NULL;
        break;
    }
    pthread_mutex_unlock(&allocations_lock);
}

static enum place place_of(const void *address) {
    enum place place = PAGEABLE_HOST;
    pthread_mutex_lock(&allocations_lock);
    for (size_t slot = 0; slot < used_slots; slot++) {
        const struct allocation *found = &allocations[slot];
        if (!found->start || (char *)address < found->start || (char *)address >= found->start + found->bytes) continue;
        place = found->place;
        break;
    }
    pthread_mutex_unlock(&allocations_lock);
    return place;
}

static cudaError_t allocate(void **address, size_t bytes, enum place place) {
    *address = NULL;
    if (!bytes) return cudaSuccess;
    bytes = (bytes + PAGE - 1) / PAGE * PAGE;
    if (place == ON_DEVICE && device_bytes + bytes > device_memory()) return cudaErrorMemoryAllocation;
    void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return cudaErrorMemoryAllocation;
    remember(start, bytes, place);
    return *address = start, cudaSuccess;
}

cudaError_t cudaMalloc(void **address, size_t bytes) {
    RECORD(ALLOCATION, "cudaMalloc", NULL, bytes);
    return allocate(address, bytes, ON_DEVICE);
}
cudaError_t cudaMallocAsync(void **address, size_t bytes, cudaStream_t stream) {
    return allocate(address, bytes, ON_DEVICE);
}
cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
    RECORD(ALLOCATION, "cudaHostAlloc", NULL, bytes);
    return allocate(address, bytes, PINNED_HOST);
}
cudaError_t cudaMallocHost(void **address, size_t bytes) { return cudaHostAlloc(address, bytes, 0); }
cudaError_t cudaFree(void *address) {
    if (address) { // cudaFree(NULL) is the usual way to create a context
        RECORD(ALLOCATION, "cudaFree", NULL, 0);
        forget(address);
    }
    return cudaSuccess;
}
cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return forget(address), cudaSuccess; }
cudaError_t cudaFreeHost(void *address) { return forget(address), cudaSuccess; }
cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    return remember(address, bytes, REGISTERED_HOST), cudaSuccess;
}
cudaError_t cudaHostUnregister(void *address) { return forget(address), cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    return *available = device_memory() - device_bytes, *total = device_memory(), cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    static const enum cudaMemoryType types[] = {
        [PAGEABLE_HOST] = cudaMemoryTypeUnregistered,
        [PINNED_HOST] = cudaMemoryTypeHost,
        [REGISTERED_HOST] = cudaMemoryTypeHost,
        [ON_DEVICE] = cudaMemoryTypeDevice,
    };
    enum cudaMemoryType type = types[place_of(address)];
    *attributes = (struct cudaPointerAttributes){
        .type = type,
        .devicePointer = type == cudaMemoryTypeUnregistered ? NULL : (void *)address,
        .hostPointer = type == cudaMemoryTypeDevice ? NULL : (void *)address,
    };
    return cudaSuccess;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute number, CUdeviceptr address) {
    *(uint64_t *)value = number == CU_POINTER_ATTRIBUTE_DEVICE_POINTER ? (uint64_t)address : 0;
    return CUDA_SUCCESS;
}

// Pools of cudaMallocAsync: there is one, and it has no settings.
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int index) { return *pool = (void *)1, cudaSuccess; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr number, void *value) {
    return *(uint64_t *)value = 0, cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr number, void *value) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *access, size_t count) {
    return cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) { return cudaSuccess; }

// The latest copies to the device of values that came from the host, and how many kernels had been launched then.
static struct {
    const char *start;
    size_t bytes;
    uint64_t launches;
} writes[WRITES];
static _Atomic size_t write_count;

static void remember_write(const void *to, size_t count) {
    size_t index = write_count++ % WRITES;
    writes[index].start = to, writes[index].bytes = count, writes[index].launches = launches_so_far();
}

// Return true if no kernel was launched since the value at `from` was copied there.
static bool value_is_known(const char *from, size_t count) {
    uint64_t launches = launches_so_far();
    for (size_t index = 0; index < WRITES; index++) {
        if (writes[index].launches != launches || from < writes[index].start) continue;
        if (from + count <= writes[index].start + writes[index].bytes) return true;
    }
    return false;
}

void copy_bytes(void *to, const void *from, size_t count) {
    bool to_device = place_of(to) == ON_DEVICE, from_device = place_of(from) == ON_DEVICE;
    bool known = !from_device || value_is_known(from, count);
    if (count <= SCALAR && !to_device && !known) {
        memset(to, 0, count);
    } else if (count <= LARGE || !to_device) {
        memcpy(to, from, count);
    }
    if (to_device && known) remember_write(to, count);
}

static void record_copy(void *to, const void *from, size_t count, const void *stream) {
    enum place source = place_of(from), target = place_of(to);
    if (source == ON_DEVICE && target == ON_DEVICE) RECORD(COPY, "on the device", stream, count);
    else if (target == ON_DEVICE) RECORD(COPY, "host to device", stream, count);
    else if (source == ON_DEVICE) RECORD(COPY, "device to host", stream, count);
    else RECORD(COPY, "on the host", stream, count);
    if (source == ON_DEVICE && target == PAGEABLE_HOST) RECORD_WAIT(PAGEABLE, "device to host", stream, count);
    if (target == ON_DEVICE && source == PAGEABLE_HOST) RECORD_WAIT(PAGEABLE, "host to device", stream, count);
}

static cudaError_t copy(void *to, const void *from, size_t count, cudaStream_t stream) {
    bool pageable = place_of(to) == PAGEABLE_HOST || place_of(from) == PAGEABLE_HOST;
    if (pageable && captured(stream)) return forbid_in_capture("a copy of pageable memory", stream, false);
    record_copy(to, from, count, stream);
    copy_bytes(to, from, count);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t count, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, from, count, stream);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t count,
                                cudaStream_t stream) {
    return copy(to, from, count, stream);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t count, enum cudaMemcpyKind kind) {
    cudaError_t error = forbid_in_capture("cudaMemcpy", NULL, true);
    if (error) return error;
    RECORD_WAIT(WAIT, "cudaMemcpy", NULL, count);
    return copy(to, from, count, NULL);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    record_copy(to, from, width * height, stream);
    for (size_t row = 0; row < height; row++)
        copy_bytes((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t count, size_t offset,
                               enum cudaMemcpyKind kind) {
    return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) { return allocate(address, PAGE, ON_DEVICE); }
cudaError_t cudaMemset(void *to, int value, size_t count) {
    LAUNCHED("memset", NULL);
    if (count <= LARGE) memset(to, value, count);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t count, cudaStream_t stream) {
    LAUNCHED("memset", stream);
    if (count <= LARGE) memset(to, value, count);
    return cudaSuccess;
}
