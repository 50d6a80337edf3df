/*
 * libcuda.so.1 for a machine without GPUs: what `gpushare card-check` calls, on the emulated cards (card.h).
 *
 * It records every call in the file $GPUSHARE_EMU_CUDA_LOG, if that is set, and fails as the node's `fault` file says
 * (FUNCTION CODE, FUNCTION hang). A kernel takes as long as its rounds say, longer beside others at work, and shows in
 * NVML's stand-in as its process's load. Like a driver it knows the kernels by their names in the PTX.
 */
#define _GNU_SOURCE
#include "card.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_PTX = 218, UNAVAILABLE = 46,
       NOT_FOUND_NAME = 500 };

static struct card *card;   /* the first that this process may use, writable */
static struct slot *slot;   /* its place there; NULL without a context */
static uint64_t pending_us, busy_us, told_us;
static const char *const kernels[] = {"arithmetic", "streaming"};
static const double round_us[] = {2.0, 300.0};
static const float access_pct[] = {2, 80};
static int running;

static void record(const char *function)
{
    const char *path = getenv("GPUSHARE_EMU_CUDA_LOG");
    int fd = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666) : -1;
    if (fd >= 0) {
        dprintf(fd, "%s\n", function);
        close(fd);
    }
}
#define BEGIN do { record(__func__); result bad_ = fault(__func__); if (bad_) return bad_; } while (0)

static struct card *writable(unsigned int index)
{
    char path[sizeof node_dir + 16];
    snprintf(path, sizeof path, "%s/card%u", node_dir, index);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    void *map = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof(struct card), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    return map == MAP_FAILED ? NULL : map;
}

/* Under a control daemon (mps_control.py): be served, or wait for it as long as it takes. */
static char mps_dir[2048];

static int mps_file(const char *name, char *text, size_t size)
{
    char path[sizeof mps_dir + 64];
    snprintf(path, sizeof path, "%s/%s", mps_dir, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, size - 1);
    if (fd >= 0)
        close(fd);
    text[got > 0 ? got : 0] = 0;
    return fd >= 0;
}

static void leave_mps(void)
{
    char path[sizeof mps_dir + 64];
    snprintf(path, sizeof path, "%s/clients/%d", mps_dir, getpid());
    unlink(path);
}

static void join_mps(void)
{
    const char *dir = getenv("CUDA_MPS_PIPE_DIRECTORY");
    char path[sizeof mps_dir + 64], text[16];
    snprintf(mps_dir, sizeof mps_dir, "%s", dir && *dir ? dir : "/nonexistent");
    snprintf(path, sizeof path, "%s/clients/%d", mps_dir, getpid());
    if (!mps_file("nvidia-cuda-mps-control.pid", text, sizeof text)) {
        mps_dir[0] = 0;
        return;
    }
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0)
        return;
    close(fd);
    atexit(leave_mps);
    for (snprintf(path, sizeof path, "served/%d", getpid()); !mps_file(path, text, sizeof text);)
        usleep(10000);
}

API result cuInit(unsigned int flags)
{
    (void)flags;
    if (find_node() != OK)
        return NO_DEVICE;
    BEGIN;
    join_mps();
    map_cards();
    char shown[64];
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (mps_dir[0] && mps_file("visible", shown, sizeof shown) && shown[0])
        visible = shown; /* the daemon numbers its clients' cards anew */
    unsigned int index = 0;
    for (unsigned int i = 0; visible && i < card_count; i++)
        if (!strncmp(visible, cards[i]->uuid, strlen(cards[i]->uuid)) || (visible[0] == (char)('0' + i)))
            index = i;
    card = writable(index);
    return card ? OK : NO_DEVICE;
}
API result cuDriverGetVersion(int *version) { BEGIN; *version = 12020; return OK; }
API result cuDeviceGetCount(int *count) { BEGIN; *count = 1; return OK; }
API result cuDeviceGet(int *device, int ordinal) { BEGIN; *device = ordinal; return ordinal ? INVALID_DEVICE : OK; }
API result cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    BEGIN;
    *value = attribute == 16 ? 80 : attribute == 75 ? 7 : 0;
    return OK;
}
API result cuGetErrorName(int code, const char **name)
{
    *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code == UNAVAILABLE ? "CUDA_ERROR_DEVICE_UNAVAILABLE"
          : code == INVALID_PTX ? "CUDA_ERROR_INVALID_PTX" : code == INVALID_DEVICE ? "CUDA_ERROR_INVALID_DEVICE"
          : code == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_UNKNOWN";
    return OK;
}

static uint64_t start_of(const char *pid)
{
    char text[1024];
    snprintf(text, sizeof text, "/proc/%s/stat", pid);
    int fd = open(text, O_RDONLY | O_CLOEXEC);
    ssize_t size = read(fd, text, sizeof text - 1);
    unsigned long long ticks = 0;
    close(fd);
    text[size > 0 ? size : 0] = 0;
    sscanf(strrchr(text, ')') + 1, " %*c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
           &ticks);
    return ticks;
}

static unsigned int present(struct load each[SLOTS]) { return loads(card, 0, 200000, each); }

API result cuCtxCreate_v2(void **context, unsigned int flags, int device)
{
    (void)flags, (void)device;
    BEGIN;
    struct load each[SLOTS];
    if (card->compute_mode == 2 || (card->compute_mode == 3 && present(each) > 0))
        return UNAVAILABLE;
    for (unsigned int i = 0; i < SLOTS && !slot; i++) {
        struct slot *at = &card->slot[i];
        int free_ = !at->join_us || at->leave_us || !process_state(at->pid, at->start_ticks);
        uint32_t was = at->pid;
        if (free_ && __atomic_compare_exchange_n(&at->pid, &was, (uint32_t)getpid(), 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            slot = at;
    }
    if (!slot)
        return UNAVAILABLE;
    slot->start_ticks = start_of("self"), slot->mem_mib = 300, slot->head = 0;
    char server[32], path[32];
    snprintf(path, sizeof path, "served/%d", getpid());
    slot->server = mps_dir[0] && mps_file(path, server, sizeof server) ? atoi(server) : 0;
    if (slot->server && getenv("GPUSHARE_EMU_MPS_BLIND")) { /* what NVML's documentation says it does */
        slot->start_ticks = start_of(server);
        slot->pid = slot->server, slot->server = 0;
    }
    told_us = clock_us(CLOCK_MONOTONIC);
    __atomic_store_n(&slot->join_us, told_us, __ATOMIC_RELEASE);
    __atomic_store_n(&slot->leave_us, 0, __ATOMIC_RELEASE);
    return *context = slot, OK;
}

API result cuModuleLoadDataEx(void **module, const char *image, unsigned int n, void *options, void *values)
{
    (void)n, (void)options, (void)values;
    BEGIN;
    *module = (void *)image;
    return strstr(image, ".version") && strstr(image, ".target sm_") ? OK : INVALID_PTX;
}
API result cuModuleGetFunction(void **function, void *module, const char *name)
{
    (void)module;
    BEGIN;
    for (unsigned int i = 0; i < 2; i++)
        if (!strcmp(name, kernels[i]))
            return *function = (void *)&kernels[i], OK;
    return NOT_FOUND_NAME;
}

API result cuMemAlloc_v2(uint64_t *pointer, size_t bytes)
{
    BEGIN;
    struct load each[SLOTS];
    uint64_t used = card->mem_reserved_mib, mib = bytes / MIB;
    for (unsigned int n = present(each), i = 0; i < n; i++)
        used += each[i].mem_mib;
    char limit[32];
    const char *own = getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"); /* it can only tighten */
    if (used + mib > card->mem_total_mib ||
        (mps_dir[0] && mps_file("limit", limit, sizeof limit) && slot->mem_mib + mib > strtoul(limit, NULL, 10)) ||
        (mps_dir[0] && own && !strncmp(own, "0=", 2) && slot->mem_mib + mib > strtoul(own + 2, NULL, 10)))
        return OUT_OF_MEMORY;
    slot->mem_mib += mib;
    return *pointer = 0x10000000, OK;
}

API result cuLaunchKernel(void *function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
                          unsigned int bz, unsigned int shared, void *stream, void **arguments, void **extra)
{
    (void)gy, (void)gz, (void)by, (void)bz, (void)shared, (void)stream, (void)extra;
    BEGIN;
    char text[4];
    if (mps_dir[0] && mps_file("fault", text, sizeof text))
        return 719; /* the documented end of every client of a server in FAULT */
    if (!gx || !bx || *(uint64_t *)arguments[0] != 0x10000000)
        return INVALID_VALUE;
    running = (int)((const char *const *)function - kernels);
    pending_us = (uint64_t)(round_us[running] * *(uint32_t *)arguments[2]);
    return OK;
}

/* Time slices: two processes at work take turns, and a process that asks little waits little. */
API result cuCtxSynchronize(void)
{
    BEGIN;
    struct load each[SLOTS];
    double others = 0;
    for (unsigned int n = present(each), i = 0; i < n; i++)
        if (each[i].pid != (uint32_t)getpid() && each[i].at_us + 200000 > clock_us(CLOCK_MONOTONIC))
            others += each[i].sm_pct / 100;
    uint64_t took_us = (uint64_t)(pending_us * (1 + others));
    usleep(took_us);
    busy_us += pending_us, pending_us = 0;
    uint64_t now = clock_us(CLOCK_MONOTONIC);
    if (now - told_us < 50000)
        return OK;
    float busy = least(100.0, 100.0 * busy_us / (now - told_us));
    slot->ring[slot->head % RING] = (struct sample){now, busy, busy * access_pct[running] / 100, 0, 0, 1};
    __atomic_store_n(&slot->head, slot->head + 1, __ATOMIC_RELEASE);
    return busy_us = 0, told_us = now, OK;
}
