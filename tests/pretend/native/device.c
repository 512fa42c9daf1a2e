// The device: its properties, contexts, errors, and the entry points that are looked up by name.
#include "pretend.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct gpu gpus[] = {
    {80, "NVIDIA A100-SXM4-80GB", 108, 166912, 167936, 40 << 20, 1410000, 1593000, 5120},
    {90, "NVIDIA H100 80GB HBM3", 132, 232448, 233472, 50 << 20, 1980000, 2619000, 5120},
    {100, "NVIDIA B200", 148, 232448, 233472, 126 << 20, 1965000, 3996000, 8192},
};

const struct gpu *gpu(void) {
    static const struct gpu *chosen;
    if (chosen) return chosen;
    const char *capability = getenv("PRETEND_CAP");
    int wanted = capability ? atoi(capability) : 90;
    for (size_t index = 0; index < sizeof gpus / sizeof *gpus; index++)
        if (gpus[index].capability == wanted) return chosen = &gpus[index];
    fprintf(stderr, "pretend: PRETEND_CAP is %s; it must be 80, 90 or 100\n", capability);
    exit(2);
}

// The name of the device: that of `gpu`, or PRETEND_NAME.
static const char *device_name(void) {
    const char *name = getenv("PRETEND_NAME");
    return name ? name : gpu()->name;
}

static __thread int device;
int current_device(void) { return device; }

// PRETEND_GPUS devices of the same kind, 1 by default.
static int device_count(void) {
    const char *count = getenv("PRETEND_GPUS");
    return count ? atoi(count) : 1;
}

size_t device_memory(void) {
    const char *gibibytes = getenv("PRETEND_GIB");
    return (gibibytes ? strtoull(gibibytes, NULL, 10) : 80ull) << 30;
}

cudaError_t cudaGetDeviceCount(int *count) { return *count = device_count(), cudaSuccess; }
cudaError_t cudaSetDevice(int index) { return device = index, cudaSuccess; }
cudaError_t cudaGetDevice(int *index) { return *index = device, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    default: return "cudaErrorOfTheStandInDevice";
    }
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorNotSupported: return "operation not supported by the stand-in device";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    default: return "error of the stand-in device";
    }
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int index) {
    const struct gpu *chosen = gpu();
    *properties = (struct cudaDeviceProp){
        .totalGlobalMem = device_memory(),
        .sharedMemPerBlock = SHARED_WITHOUT_REQUEST,
        .sharedMemPerBlockOptin = chosen->shared_per_block,
        .sharedMemPerMultiprocessor = chosen->shared_per_processor,
        .reservedSharedMemPerBlock = 1024,
        .regsPerBlock = 65536,
        .regsPerMultiprocessor = 65536,
        .warpSize = 32,
        .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .maxThreadsPerMultiProcessor = 2048,
        .maxBlocksPerMultiProcessor = 32,
        .major = chosen->capability / 10,
        .minor = chosen->capability % 10,
        .multiProcessorCount = chosen->processors,
        .l2CacheSize = chosen->level2_cache,
        .memoryBusWidth = chosen->memory_bus_bits,
        .textureAlignment = 512,
        .unifiedAddressing = 1,
        .concurrentKernels = 1,
        .asyncEngineCount = 3,
        .cooperativeLaunch = 1,
        .managedMemory = 1,
        .canMapHostMemory = 1,
    };
    snprintf(properties->name, sizeof properties->name, "%s", device_name());
    return cudaSuccess;
}

// cudaDeviceAttr and CUdevice_attribute have the same numbers. The rest are capabilities of the kind yes or no.
static int attribute(int number) {
    const struct gpu *chosen = gpu();
    switch (number) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return SHARED_WITHOUT_REQUEST;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return chosen->shared_per_block;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return chosen->shared_per_processor;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrClockRate: return chosen->clock_khz;
    case cudaDevAttrMemoryClockRate: return chosen->memory_clock_khz;
    case cudaDevAttrGlobalMemoryBusWidth: return chosen->memory_bus_bits;
    case cudaDevAttrMultiProcessorCount: return chosen->processors;
    case cudaDevAttrL2CacheSize: return chosen->level2_cache;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrComputeCapabilityMajor: return chosen->capability / 10;
    case cudaDevAttrComputeCapabilityMinor: return chosen->capability % 10;
    default: return 1;
    }
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr number, int index) {
    return *value = attribute(number), cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int index) {
    snprintf(text, length, "0000:00:%02x.0", index);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return *least = 0, *greatest = -5, cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *possible, int from, int to) { return *possible = 1, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }

// The driver's entry points that Triton, Inductor and PyTorch load by name.

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = CUDART_VERSION, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = device_count(), CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *handle, int index) { return *handle = index, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute number, CUdevice index) {
    return *value = attribute((int)number), CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice index) { return *bytes = device_memory(), CUDA_SUCCESS; }
CUresult cuDeviceGetName(char *text, int length, CUdevice index) {
    snprintf(text, length, "%s", device_name());
    return CUDA_SUCCESS;
}

#define CONTEXT ((CUcontext)0x10)
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = CONTEXT, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent_v2(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent_v2(CUcontext *context) { return *context = CONTEXT, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *handle) { return *handle = device, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 1 << 20, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice index) { return *context = CONTEXT, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice index) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice index, unsigned *flags, int *active) {
    return *flags = 0, *active = 1, CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char **text) {
    return *text = cudaGetErrorName((cudaError_t)error), CUDA_SUCCESS; // both have the same numbers
}
CUresult cuGetErrorString(CUresult error, const char **text) {
    return *text = cudaGetErrorString((cudaError_t)error), CUDA_SUCCESS;
}

// Messages of the driver, of which there are none.
CUresult cuLogsRegisterCallback(CUlogsCallback function, void *data, CUlogsCallbackHandle *handle) {
    return *handle = NULL, CUDA_SUCCESS;
}
CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle handle) { return CUDA_SUCCESS; }

// What is looked up by name and does not exist here: it may be held in a table and never be called.
static char missing_names[4096];
static CUresult missing(void) {
    refuse("one of the driver's entry points that the stand-in device does not have:%s", missing_names);
    return CUDA_ERROR_NOT_SUPPORTED;
}

static void *entry_point(const char *name) {
    void *found = dlsym(RTLD_DEFAULT, name);
    if (!found) { // the tables of CUDA name a function without the suffix of its version
        char versioned[256];
        snprintf(versioned, sizeof versioned, "%s_v2", name);
        found = dlsym(RTLD_DEFAULT, versioned);
    }
    if (found) return found;
    if (!strstr(missing_names, name) && strlen(missing_names) + strlen(name) + 2 < sizeof missing_names)
        strcat(strcat(missing_names, " "), name);
    return (void *)missing;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    *function = entry_point(name);
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *result) {
    *function = entry_point(name);
    if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}
