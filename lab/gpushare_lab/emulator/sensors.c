/* What the sensors of an emulated card show: memory, utilisation, power, temperature, clocks, PCIe traffic. */
#include "api.h"

/* ---- memory ---- */
struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned int version; unsigned long long total, reserved, free, used; };
#define MEMORY_V2 (sizeof(struct memory_v2) | 2U << 24)

API result nvmlDeviceGetMemoryInfo(struct card *card, struct memory *memory)
{
    DEVICE;
    memory->total = card->mem_total_mib * MIB;
    memory->used = (card->mem_reserved_mib + total(card, SHORT_WINDOW_US).mem_mib) * MIB; /* v1 counts the driver's own */
    memory->free = memory->total - memory->used;
    return OK;
}

API result nvmlDeviceGetMemoryInfo_v2(struct card *card, struct memory_v2 *memory)
{
    DEVICE;
    if (memory->version != MEMORY_V2)
        return ARGUMENT_VERSION_MISMATCH;
    memory->total = card->mem_total_mib * MIB;
    memory->reserved = card->mem_reserved_mib * MIB;
    memory->used = total(card, SHORT_WINDOW_US).mem_mib * MIB;
    memory->free = memory->total - memory->reserved - memory->used;
    return OK;
}

/* ---- how busy ---- */
struct utilization { unsigned int gpu, memory; };

API result nvmlDeviceGetUtilizationRates(struct card *card, struct utilization *rates)
{
    DEVICE;
    struct load now = total(card, SHORT_WINDOW_US);
    rates->gpu = whole(now.sm_pct), rates->memory = whole(now.mem_pct);
    return OK;
}

API result nvmlDeviceGetEncoderUtilization(struct card *card, unsigned int *pct, unsigned int *period_us)
{
    DEVICE;
    *pct = 0, *period_us = 167000;
    return OK;
}
API result nvmlDeviceGetDecoderUtilization(struct card *card, unsigned int *pct, unsigned int *period_us)
{
    return nvmlDeviceGetEncoderUtilization(card, pct, period_us);
}

static double watts(const struct card *card, struct load load)
{
    double dynamic = (load.pid ? 0.06 : 0) + 0.0070 * load.sm_pct + 0.0020 * load.mem_pct; /* a context alone wakes it */
    return card->power_idle_w + dynamic * (card->power_limit_w - card->power_idle_w);
}

API result nvmlDeviceGetPowerUsage(struct card *card, unsigned int *milliwatts)
{
    DEVICE;
    *milliwatts = whole(1000 * watts(card, total(card, SHORT_WINDOW_US)));
    return OK;
}
API result nvmlDeviceGetPowerManagementLimit(struct card *card, unsigned int *milliwatts)
{
    DEVICE;
    *milliwatts = 1000 * card->power_limit_w;
    return OK;
}
API result nvmlDeviceGetPowerManagementDefaultLimit(struct card *card, unsigned int *milliwatts)
{
    return nvmlDeviceGetPowerManagementLimit(card, milliwatts);
}
API result nvmlDeviceGetEnforcedPowerLimit(struct card *card, unsigned int *milliwatts)
{
    return nvmlDeviceGetPowerManagementLimit(card, milliwatts);
}
API result nvmlDeviceGetPowerManagementLimitConstraints(struct card *card, unsigned int *least_mw, unsigned int *most_mw)
{
    DEVICE;
    *least_mw = 500 * card->power_limit_w, *most_mw = 1000 * card->power_limit_w;
    return OK;
}

API result nvmlDeviceGetTemperature(struct card *card, int sensor, unsigned int *celsius)
{
    DEVICE;
    if (sensor != 0)
        return INVALID_ARGUMENT;
    *celsius = whole(29 + 0.12 * watts(card, total(card, LONG_WINDOW_US))); /* metal is slow: follow seconds, not samples */
    return OK;
}
struct temperature { unsigned int version; int sensor, celsius; };
API result nvmlDeviceGetTemperatureV(struct card *card, struct temperature *temperature)
{
    DEVICE;
    unsigned int celsius = 0;
    if (temperature->version != (sizeof(struct temperature) | 1U << 24))
        return ARGUMENT_VERSION_MISMATCH;
    result code = nvmlDeviceGetTemperature(card, temperature->sensor, &celsius);
    temperature->celsius = (int)celsius;
    return code;
}

enum { CLOCK_GRAPHICS, CLOCK_SM, CLOCK_MEM, CLOCK_VIDEO };

API result nvmlDeviceGetMaxClockInfo(struct card *card, int type, unsigned int *mhz)
{
    DEVICE;
    if (type < CLOCK_GRAPHICS || type > CLOCK_VIDEO)
        return INVALID_ARGUMENT;
    *mhz = type == CLOCK_MEM ? 877 : type == CLOCK_VIDEO ? 1372 : 1530;
    return OK;
}

API result nvmlDeviceGetClockInfo(struct card *card, int type, unsigned int *mhz)
{
    result code = nvmlDeviceGetMaxClockInfo(card, type, mhz);
    if (code != OK || type == CLOCK_MEM) /* HBM2 runs at one speed */
        return code;
    struct load now = total(card, SHORT_WINDOW_US);
    if (now.pid == 0)
        *mhz = type == CLOCK_VIDEO ? 555 : 135;
    else /* the closer to its power limit, the slower it boosts, in steps of 7.5 MHz */
        *mhz = whole(*mhz - 7.5 * (int)(now.sm_pct / 10));
    return OK;
}
API result nvmlDeviceGetPerformanceState(struct card *card, int *state)
{
    DEVICE;
    *state = 0; /* a V100 idles in P0 */
    return OK;
}

API result nvmlDeviceGetPcieThroughput(struct card *card, int counter, unsigned int *kb_s)
{
    DEVICE;
    if (counter != 0 && counter != 1)
        return INVALID_ARGUMENT;
    struct load now = total(card, SHORT_WINDOW_US);
    *kb_s = whole(counter == 0 ? now.tx_kb_s : now.rx_kb_s);
    return OK;
}
API result nvmlDeviceGetCurrPcieLinkGeneration(struct card *card, unsigned int *gen) { DEVICE; *gen = 3; return OK; }
API result nvmlDeviceGetMaxPcieLinkGeneration(struct card *card, unsigned int *gen) { DEVICE; *gen = 3; return OK; }
API result nvmlDeviceGetCurrPcieLinkWidth(struct card *card, unsigned int *width) { DEVICE; *width = 16; return OK; }
API result nvmlDeviceGetMaxPcieLinkWidth(struct card *card, unsigned int *width) { DEVICE; *width = 16; return OK; }

/* What an SXM2 module has not got, or what this emulation leaves out although the driver exports it. */
API result nvmlDeviceGetFanSpeed(struct card *card, unsigned int *pct) { DEVICE; *pct = 0; return NOT_SUPPORTED; }
API result nvmlDeviceGetMigMode(struct card *card, unsigned int *now, unsigned int *pending)
{
    DEVICE;
    *now = *pending = 0;
    return NOT_SUPPORTED;
}
API result nvmlDeviceGetTotalEnergyConsumption(struct card *card, unsigned long long *mj) { DEVICE; *mj = 0; return NOT_SUPPORTED; }
