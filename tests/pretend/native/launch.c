// Kernels: their names, as the compiled libraries and Triton register them, the limits of a launch, and counting.
#include "pretend.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct kernel {
    const void *handle; // address of the host's stub function, or a CUfunction
    struct counter *launch, *in_graph;
    int shared_allowed; // bytes of dynamic shared memory that the kernel has asked for
};

#define KERNELS (1 << 18) // slots of the hash table
static struct kernel kernels[KERNELS];
static struct kernel unregistered;
static pthread_mutex_t kernels_lock = PTHREAD_MUTEX_INITIALIZER;

static struct kernel *slot_of(const void *handle) {
    size_t slot = ((uint64_t)handle * 11400714819323198485ull) >> 46; // Fibonacci hashing: the upper 18 bits
    while (kernels[slot].handle && kernels[slot].handle != handle) slot = (slot + 1) % KERNELS;
    return &kernels[slot];
}

static void name_kernel(struct kernel *kernel, const char *name) {
    kernel->launch = counter_of(LAUNCH, name), kernel->in_graph = counter_of(CAPTURED, name);
    kernel->shared_allowed = SHARED_WITHOUT_REQUEST;
}

static void register_kernel(const void *handle, const char *name) {
    pthread_mutex_lock(&kernels_lock);
    struct kernel *kernel = slot_of(handle);
    name_kernel(kernel, name);
    kernel->handle = handle;
    pthread_mutex_unlock(&kernels_lock);
}

static struct kernel *kernel_of(const void *handle) {
    struct kernel *kernel = slot_of(handle);
    if (kernel->handle) return kernel;
    if (!unregistered.launch) name_kernel(&unregistered, "unregistered kernel");
    return &unregistered;
}

// Return what is wrong with a launch, NULL if nothing is.
static const char *fault(dim3 grid, dim3 block, size_t shared, const struct kernel *kernel) {
    if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z) return "a dimension is 0";
    if (grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535) return "the grid is above 2147483647, 65535, 65535";
    if (block.x > 1024 || block.y > 1024 || block.z > 64) return "the block is above 1024, 1024, 64";
    if ((uint64_t)block.x * block.y * block.z > 1024) return "the block has more than 1024 threads";
    if (shared > (size_t)gpu()->shared_per_block) return "more shared memory than a block can have";
    if (shared > (size_t)kernel->shared_allowed) return "more shared memory than the kernel has asked for";
    return NULL;
}

static cudaError_t launch(const void *handle, dim3 grid, dim3 block, size_t shared, const void *stream) {
    struct kernel *kernel = kernel_of(handle);
    const char *reason = fault(grid, block, shared, kernel);
    if (reason) {
        refuse("launch with grid %u, %u, %u, block %u, %u, %u and %zu bytes of shared memory: %s: %s", grid.x, grid.y,
               grid.z, block.x, block.y, block.z, shared, reason, kernel->launch->name);
        return cudaErrorInvalidConfiguration;
    }
    record_launch(kernel->launch, kernel->in_graph, stream);
    return cudaSuccess;
}

static cudaError_t allow_shared(const void *handle, int bytes) {
    struct kernel *kernel = kernel_of(handle);
    if (bytes > gpu()->shared_per_block) {
        refuse("request of %d bytes of shared memory, a block can have %d: %s", bytes, gpu()->shared_per_block,
               kernel->launch->name);
        return cudaErrorInvalidValue;
    }
    if (kernel != &unregistered) kernel->shared_allowed = bytes > SHARED_WITHOUT_REQUEST ? bytes : SHARED_WITHOUT_REQUEST;
    return cudaSuccess;
}

// What nvcc's generated code calls: registration when a library is loaded, and the <<<>>> syntax.

void **__cudaRegisterFatBinary(void *binary) { return calloc(1, 64); }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) { free(handle); }
char __cudaInitModule(void **handle) { return 0; }
void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int external, size_t bytes,
                       int constant, int global) {}
void __cudaRegisterFunction(void **handle, const char *host, char *function, const char *name, int threads, void *tid,
                            void *bid, void *block, void *grid, int *warp) {
    register_kernel(host, name);
}

static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configuration.grid = grid, configuration.block = block;
    configuration.shared = shared, configuration.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid, *block = configuration.block;
    *shared = configuration.shared, *(void **)stream = configuration.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) { return *kernel = (void *)host, cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    return launch(kernel, grid, block, shared, stream);
}

// The runtime.

cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    return launch(host, grid, block, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **arguments) {
    return launch(host, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
    return launch(host, grid, block, shared, stream);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    return function(argument), cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *host, enum cudaFuncAttribute number, int value) {
    return number == cudaFuncAttributeMaxDynamicSharedMemorySize ? allow_shared(host, value) : cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *host) {
    *attributes = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024,
        .numRegs = 64, // of compiled libraries nothing is known; 64 lets every block size pass
        .binaryVersion = gpu()->capability,
        .ptxVersion = gpu()->capability,
        .maxDynamicSharedSizeBytes = gpu()->shared_per_block,
    };
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *host, int threads, size_t shared) {
    return *blocks = 2, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *host, int threads,
                                                                   size_t shared, unsigned flags) {
    return *blocks = 2, cudaSuccess;
}

// The driver: Triton's and Inductor's kernels.

CUresult cuModuleLoad(CUmodule *module, const char *file) { return *module = malloc(16), CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return *module = malloc(16), CUDA_SUCCESS; }
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *names, void **values) {
    return *module = malloc(16), CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; } // kept: a new one gets another address
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = calloc(1, 16);
    register_kernel(*function, name);
    return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute number, CUfunction function) {
    *value = number == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : number == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute number, int value) {
    if (number == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return (CUresult)allow_shared(function, value);
    // Later attributes came after CUDA 13.0. Triton then uses the one above for shared memory.
    return number > CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                        void **extra) {
    dim3 grid = {grid_x, grid_y, grid_z}, block = {block_x, block_y, block_z};
    return (CUresult)launch(function, grid, block, shared, stream);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    dim3 grid = {config->gridDimX, config->gridDimY, config->gridDimZ};
    dim3 block = {config->blockDimX, config->blockDimY, config->blockDimZ};
    return (CUresult)launch(function, grid, block, config->sharedMemBytes, config->hStream);
}
CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                   CUstream stream, void **arguments) {
    dim3 grid = {grid_x, grid_y, grid_z}, block = {block_x, block_y, block_z};
    return (CUresult)launch(function, grid, block, shared, stream);
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) {
    return *blocks = 2, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
    return *clusters = 4, CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
    return memset(map, 0, sizeof *map), CUDA_SUCCESS;
}
