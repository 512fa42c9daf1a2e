// Counters by kind and name, a log of what happened in order, and reports of waits to Python.
#include "record.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define COUNTERS (1 << 18) // slots of the hash table; PyTorch has about 30,000 kernels, with two counters each
#define EVENTS (1 << 22)

// What Python reads: tests/pretend/device.py declares the same structure.
struct event {
    uint64_t counter; // slot as of pretend_counter
    uint64_t stream;
    uint64_t amount;
};

typedef void (*wait_callback)(const char *kind, const char *name, uint64_t amount);

static struct counter table[COUNTERS];
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static struct event *events;
static _Atomic size_t event_count;
static _Atomic bool logging;
static _Atomic uint64_t launch_count;
static _Atomic(wait_callback) callback;

static uint64_t hash(const char *kind, const char *name) {
    uint64_t value = 1469598103934665603ull; // FNV-1a
    for (const char *text = kind; *text; text++) value = (value ^ (unsigned char)*text) * 1099511628211ull;
    for (const char *text = name; *text; text++) value = (value ^ (unsigned char)*text) * 1099511628211ull;
    return value;
}

struct counter *counter_of(const char *kind, const char *name) {
    if (!name) name = "unnamed";
    pthread_mutex_lock(&table_lock);
    size_t slot = hash(kind, name) % COUNTERS;
    for (size_t tried = 0; table[slot].name; slot = (slot + 1) % COUNTERS) {
        if (!strcmp(table[slot].kind, kind) && !strcmp(table[slot].name, name)) break;
        if (++tried == COUNTERS) {
            fprintf(stderr, "pretend: more than %d counters; raise COUNTERS in record.c\n", COUNTERS);
            abort();
        }
    }
    if (!table[slot].name) {
        table[slot].kind = kind, table[slot].name = strdup(name);
        table[slot].is_launch = !strcmp(kind, LAUNCH) || !strcmp(kind, CAPTURED);
    }
    pthread_mutex_unlock(&table_lock);
    return &table[slot];
}

void record(struct counter *counter, const void *stream, uint64_t amount) {
    atomic_fetch_add(&counter->count, 1);
    if (counter->is_launch) atomic_fetch_add(&launch_count, 1);
    if (!atomic_load(&logging)) return;
    size_t index = atomic_fetch_add(&event_count, 1);
    if (index < EVENTS) events[index] = (struct event){(uint64_t)(counter - table), (uint64_t)stream, amount};
}

void record_wait(struct counter *counter, const void *stream, uint64_t amount) {
    record(counter, stream, amount);
    wait_callback report = atomic_load(&callback);
    if (report) report(counter->kind, counter->name, amount);
}

uint64_t launches_so_far(void) { return atomic_load(&launch_count); }

void refuse(const char *format, ...) {
    char message[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    fprintf(stderr, "pretend: refused: %s\n", message);
    record(counter_of(REFUSED, message), NULL, 0);
}

// The rest is called from Python.

// Set all counts to zero and forget the log. With `log`, what happens from now on is logged in order.
void pretend_reset(bool log) {
    if (log && !events) {
        events = mmap(NULL, EVENTS * sizeof *events, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    atomic_store(&logging, log);
    atomic_store(&event_count, 0);
    for (size_t slot = 0; slot < COUNTERS; slot++) atomic_store(&table[slot].count, 0);
}

// Report waits (kinds "wait" and "pageable") to a function, or to none with NULL.
void pretend_report_waits(wait_callback function) { atomic_store(&callback, function); }

// Read the slot, and return its count; 0 behind the last.
long pretend_counter(size_t slot, const char **kind, const char **name) {
    if (slot >= COUNTERS) return 0;
    *kind = table[slot].kind, *name = table[slot].name;
    return atomic_load(&table[slot].count);
}

// Return the first slot from `slot` on whose count is not 0, COUNTERS if there is none.
size_t pretend_next_counter(size_t slot) {
    while (slot < COUNTERS && !atomic_load(&table[slot].count)) slot++;
    return slot;
}

// Return the log and its length, at most EVENTS; what happened later than that is missing.
const struct event *pretend_events(size_t *count) {
    size_t logged = atomic_load(&event_count);
    *count = logged < EVENTS ? logged : EVENTS;
    return events;
}
