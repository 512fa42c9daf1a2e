// Shared parts of the stand-in CUDA device: a library that is loaded before the CUDA libraries and answers their entry
// points without a GPU. Memory and copies are real (in host memory), kernels are checked and counted but compute nothing.
#pragma once
#include "record.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#if CUDART_VERSION < 13000
#error "the stand-in device answers the entry points of CUDA 13 or newer; use a PyTorch built for it"
#endif

// device.c: the device that is imitated, chosen by PRETEND_CAP (its compute capability).

struct gpu {
    int capability; // 80 for compute capability 8.0
    const char *name;
    int processors;           // streaming multiprocessors
    int shared_per_block;     // bytes of shared memory that a block may request
    int shared_per_processor; // bytes
    int level2_cache;         // bytes
    int clock_khz, memory_clock_khz, memory_bus_bits;
};
const struct gpu *gpu(void);
#define GPUS 8
int current_device(void);
// Bytes of memory of a device: PRETEND_GIB gibibytes, 80 by default.
size_t device_memory(void);
#define SHARED_WITHOUT_REQUEST 49152 // bytes; a kernel that uses more must ask for it by an attribute

// streams.c: CUDA graphs being captured.

// Return true if work on `stream` is captured into a graph now.
bool captured(const void *stream);
// Return cudaErrorStreamCaptureUnsupported and say so if a graph is being captured, cudaSuccess otherwise. `stream` is
// the one that the call concerns, NULL for the whole device.
cudaError_t forbid_in_capture(const char *call, const void *stream, bool whole_device);

// memory.c

// Copy between any two places, unless a large amount would go to the device (see memory.c).
void copy_bytes(void *to, const void *from, size_t count);
