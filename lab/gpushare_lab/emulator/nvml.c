/*
 * libnvidia-ml.so.1 for a machine without GPUs: answers NVML's questions from the card files that
 * emulated jobs write under $GPUSHARE_EMU_DIR/<node>/ (layout: card.h).
 *
 * It never writes to a card, except for the compute mode, and takes no lock: every value it reads is
 * published by one aligned 8-byte store, after the bytes that it makes visible. A process counts only while
 * its pid is alive with the start time it had when it joined, so a killed job is gone at the next call.
 *
 * Faults for tests are lines of the node's file `fault`: FUNCTION CODE, FUNCTION hang or FUNCTION hang SECONDS,
 * where FUNCTION may be `*`. They are read on each call, so a fault may come and go.
 */
#define _GNU_SOURCE
#include "api.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

int references;
static uint64_t wall_shift_us; /* wall clock less monotonic, fixed at init so that a sample's time never changes */

/* ---- begin and end ---- */
API result nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    result bad = references == 0 ? find_node() : OK;
    if (bad == OK)
        bad = fault("nvmlInit");
    if (bad == OK && references == 0) {
        wall_shift_us = clock_us(CLOCK_REALTIME) - clock_us(CLOCK_MONOTONIC);
        map_cards();
        if (card_count == 0)
            bad = DRIVER_NOT_LOADED;
    }
    if (bad == OK)
        references++;
    return bad;
}
API result nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API result nvmlInit(void) { return nvmlInitWithFlags(0); }

API result nvmlShutdown(void)
{
    if (references == 0)
        return UNINITIALIZED;
    if (--references == 0)
        unmap_cards();
    return OK;
}

/* ---- the system ---- */
static result copy(char *to, unsigned int size, const char *text)
{
    if (!to)
        return INVALID_ARGUMENT;
    if (strlen(text) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return OK;
}

API result nvmlSystemGetDriverVersion(char *version, unsigned int size) { BEGIN; return copy(version, size, "535.183.01"); }
API result nvmlSystemGetNVMLVersion(char *version, unsigned int size) { BEGIN; return copy(version, size, "12.535.183.01"); }
API result nvmlSystemGetCudaDriverVersion(int *version) { BEGIN; *version = 12020; return OK; }
API result nvmlSystemGetCudaDriverVersion_v2(int *version) { BEGIN; *version = 12020; return OK; }

API result nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int size)
{
    BEGIN;
    char path[32];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NOT_FOUND;
    ssize_t length = size > 0 ? read(fd, name, size - 1) : -1;
    close(fd);
    if (length < 0)
        return INVALID_ARGUMENT;
    name[length] = 0;
    return OK;
}

API const char *nvmlErrorString(result code)
{
    switch (code) {
    case OK: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case 5: return "Already Initialized";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case 8: return "Insufficient External Power";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 11: return "Interrupt Request Issue";
    case 12: return "NVML Shared Library Not Found";
    case 13: return "Function Not Found";
    case 14: return "Corrupted infoROM";
    case 15: return "GPU is lost";
    case 16: return "GPU requires restart";
    case 17: return "The operating system has blocked the request.";
    case 18: return "Driver/library version mismatch";
    case ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

/* ---- finding a device ---- */
API result nvmlDeviceGetCount_v2(unsigned int *count) { BEGIN; *count = card_count; return OK; }
API result nvmlDeviceGetCount(unsigned int *count) { BEGIN; *count = card_count; return OK; }

API result nvmlDeviceGetHandleByIndex_v2(unsigned int index, struct card **device)
{
    BEGIN;
    if (index >= card_count || !device)
        return INVALID_ARGUMENT;
    *device = cards[index];
    return OK;
}
API result nvmlDeviceGetHandleByIndex(unsigned int index, struct card **device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

API result nvmlDeviceGetHandleByUUID(const char *uuid, struct card **device)
{
    BEGIN;
    if (!uuid || !device)
        return INVALID_ARGUMENT;
    for (unsigned int i = 0; i < card_count; i++)
        if (!strcmp(cards[i]->uuid, uuid))
            return *device = cards[i], OK;
    return NOT_FOUND;
}

API result nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, struct card **device)
{
    BEGIN;
    if (!bus_id || !device)
        return INVALID_ARGUMENT;
    for (unsigned int i = 0; i < card_count; i++) /* the domain may be written with 8 digits, 4, or left out */
        if (!strcasecmp(cards[i]->bus_id, bus_id) || !strcasecmp(cards[i]->bus_id + 4, bus_id) ||
            !strcasecmp(cards[i]->bus_id + 9, bus_id))
            return *device = cards[i], OK;
    return NOT_FOUND;
}
API result nvmlDeviceGetHandleByPciBusId(const char *bus_id, struct card **device)
{
    return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}

/* ---- what a device is ---- */
API result nvmlDeviceGetName(struct card *card, char *name, unsigned int size) { DEVICE; return copy(name, size, card->name); }
API result nvmlDeviceGetUUID(struct card *card, char *uuid, unsigned int size) { DEVICE; return copy(uuid, size, card->uuid); }
API result nvmlDeviceGetIndex(struct card *card, unsigned int *index) { DEVICE; *index = card->index; return OK; }
API result nvmlDeviceGetMinorNumber(struct card *card, unsigned int *minor) { DEVICE; *minor = card->index; return OK; }
API result nvmlDeviceGetBrand(struct card *card, unsigned int *brand) { DEVICE; *brand = 2; return OK; } /* Tesla */
API result nvmlDeviceGetPersistenceMode(struct card *card, unsigned int *mode) { DEVICE; *mode = 1; return OK; }

API result nvmlDeviceGetCudaComputeCapability(struct card *card, int *major, int *minor)
{
    DEVICE;
    *major = 7, *minor = 0;
    return OK;
}

struct pci { char bus_id_legacy[16]; unsigned int domain, bus, device, device_id, subsystem_id; char bus_id[32]; };

API result nvmlDeviceGetPciInfo_v3(struct card *card, struct pci *pci)
{
    DEVICE;
    memset(pci, 0, sizeof *pci);
    sscanf(card->bus_id, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    pci->device_id = 0x1DB110DE, pci->subsystem_id = 0x121210DE;
    strcpy(pci->bus_id, card->bus_id);
    strcpy(pci->bus_id_legacy, card->bus_id + 4);
    return OK;
}

API result nvmlDeviceGetComputeMode(struct card *card, unsigned int *mode)
{
    DEVICE;
    *mode = __atomic_load_n(&card->compute_mode, __ATOMIC_ACQUIRE);
    return OK;
}

API result nvmlDeviceSetComputeMode(struct card *card, unsigned int mode)
{
    DEVICE;
    if (mode > 3 || mode == 1)
        return INVALID_ARGUMENT;
    if (geteuid() != 0)
        return NO_PERMISSION;
    char path[sizeof node_dir + 16];
    uint32_t value = mode;
    snprintf(path, sizeof path, "%s/card%u", node_dir, card->index);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    ssize_t wrote = fd < 0 ? -1 : pwrite(fd, &value, sizeof value, __builtin_offsetof(struct card, compute_mode));
    if (fd >= 0)
        close(fd);
    return wrote == sizeof value ? OK : UNKNOWN;
}

/* ---- processes ---- */
struct process_v1 { unsigned int pid; unsigned long long used; };
struct process_v2 { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; };

/* A client of MPS is in a list of its own; in the other one stands its server, once. */
static unsigned int listed(const struct card *card, int clients, struct load each[SLOTS])
{
    struct load all[SLOTS];
    unsigned int found = loads(card, 0, 0, all), n = 0;
    for (unsigned int i = 0; i < found; i++) {
        struct load one = all[i];
        int known_ = !one.server == clients;
        if (!clients && one.server) {
            one = (struct load){.pid = one.server};
            for (unsigned int k = 0; k < n; k++)
                known_ |= each[k].pid == one.pid;
        }
        if (!known_)
            each[n++] = one;
    }
    return n;
}

static result processes(const struct card *card, unsigned int *count, void *out, int v1, int clients)
{
    struct load each[SLOTS];
    unsigned int n = listed(card, clients, each), room = *count;
    *count = n;
    if (n > room || (n > 0 && !out))
        return INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < n; i++)
        if (v1)
            ((struct process_v1 *)out)[i] = (struct process_v1){each[i].pid, each[i].mem_mib * MIB};
        else
            ((struct process_v2 *)out)[i] = (struct process_v2){each[i].pid, each[i].mem_mib * MIB, ~0U, ~0U};
    return OK;
}
API result nvmlDeviceGetComputeRunningProcesses(struct card *card, unsigned int *count, struct process_v1 *out)
{
    DEVICE;
    return processes(card, count, out, 1, 0);
}
API result nvmlDeviceGetComputeRunningProcesses_v2(struct card *card, unsigned int *count, struct process_v2 *out)
{
    DEVICE;
    return processes(card, count, out, 0, 0);
}
API result nvmlDeviceGetComputeRunningProcesses_v3(struct card *card, unsigned int *count, struct process_v2 *out)
{
    DEVICE;
    return processes(card, count, out, 0, 0);
}

static result nobody(struct card *card, unsigned int *count)
{
    DEVICE;
    *count = 0;
    return OK;
}
API result nvmlDeviceGetGraphicsRunningProcesses(struct card *card, unsigned int *count, void *out) { (void)out; return nobody(card, count); }
API result nvmlDeviceGetGraphicsRunningProcesses_v2(struct card *card, unsigned int *count, void *out) { (void)out; return nobody(card, count); }
API result nvmlDeviceGetGraphicsRunningProcesses_v3(struct card *card, unsigned int *count, void *out) { (void)out; return nobody(card, count); }
API result nvmlDeviceGetMPSComputeRunningProcesses_v3(struct card *card, unsigned int *count, struct process_v2 *out)
{
    DEVICE;
    return processes(card, count, out, 0, 1);
}

struct process_sample { unsigned int pid; unsigned long long at_us; unsigned int sm, mem, enc, dec; };

/* Timestamps are wall-clock microseconds, as NVML's; the card file keeps monotonic ones. One entry for each process
 * that has samples newer than `last_seen_us`: their mean, stamped with the newest. */
API result nvmlDeviceGetProcessUtilization(struct card *card, struct process_sample *out, unsigned int *count,
                                           unsigned long long last_seen_us)
{
    DEVICE;
    struct load each[SLOTS];
    uint64_t shift = wall_shift_us;
    unsigned int n = loads(card, last_seen_us > shift ? last_seen_us - shift : 0, 1000000, each), filled = 0, room = *count;
    for (unsigned int i = 0; i < n; i++) {
        if (each[i].at_us == 0 || each[i].at_us + shift <= last_seen_us || each[i].sm_pct <= 0)
            continue;
        if (out && filled < room)
            out[filled] = (struct process_sample){each[i].pid, each[i].at_us + shift, whole(least(each[i].sm_pct, 100)),
                                                  whole(least(each[i].mem_pct, 100)), 0, 0};
        filled++;
    }
    if (filled == 0)
        return NOT_FOUND;
    *count = out && filled <= room ? filled : SLOTS; /* room for whoever joins between the two calls */
    return out && filled <= room ? OK : INSUFFICIENT_SIZE;
}
