/* An emulated training job that costs next to nothing: dozens of them run on one core.
 *
 *     light_job WORK_S EPOCHS GPU_UTIL_PCT MEM_ACCESS_PCT MEM_MIB PROFILE RATES_FILE
 *
 * It does what `workload.py` does on the card that CUDA_VISIBLE_DEVICES names: takes a seat, works at the speed that its
 * neighbours leave it, publishes its load, and leaves. Where several cards are named it has a seat on each, as a job that
 * trains on all of them at once, and is as fast as on the slowest. RATES_FILE has a line `NEIGHBOUR RATE` for each profile that was
 * measured beside its own; rate 0 means that the two do not fit on one card. A file that changes holds from then on. At the end it prints one line with times
 * of the wall clock:
 *
 *     done node=gpu0 gpu=2 joined_s=1700000000.123 ended_s=1700000010.456 work_s=10.000
 *
 * with `gpu=0,1,2,3` where it had four cards.
 *
 * What it leaves out: checkpoints, memory that grows, the CPU's load, and the contention model for pairs that nobody
 * measured (those do not disturb each other).
 */
#define _GNU_SOURCE
#include "../emulator/card.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define TICK_US 500000ULL         /* how often load is published; the accuracy of the work does not depend on it */
#define SHORTEST_SAMPLE_US 100000ULL
#define MAX_NEIGHBOURS 1024
#define NOISE 0.015

struct neighbour { char profile[64]; double rate; };
struct place { int fd; struct card *card; struct slot *seat; };
struct stay { unsigned int place; uint64_t since_us, until_us; double rate; }; /* until_us 0: still there */
struct phase { double until, gpu, memory, pcie; };

/* Loading, training and validation as `load.py` has them. */
static const struct phase PHASES[] = {{0.04, 0.35, 0.30, 1.00}, {0.90, 1.00, 1.00, 0.60}, {1.00, 0.72, 0.65, 0.80}};

static struct neighbour neighbours[MAX_NEIGHBOURS];
static unsigned int neighbour_count;
static struct place places[MAX_CARDS];
static unsigned int place_count;
static uint64_t joined_us;
static const char *profile;
static double work_s, epoch_s, gpu_pct, access_pct, mem_mib;

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "light_job: error: %s: %s\n", what, why);
    exit(1);
}

static uint64_t now_us(void) { return clock_us(CLOCK_MONOTONIC); }

/* ---- what is known of other profiles ---- */
static void read_rates(const char *path)
{
    static struct timespec read_last;
    struct stat st;
    FILE *file;
    if (stat(path, &st) || !memcmp(&st.st_mtim, &read_last, sizeof read_last))
        return;
    if (!(file = fopen(path, "re")))
        return;
    read_last = st.st_mtim;
    neighbour_count = 0;
    while (neighbour_count < MAX_NEIGHBOURS &&
           fscanf(file, "%63s %lf", neighbours[neighbour_count].profile, &neighbours[neighbour_count].rate) == 2)
        neighbour_count++;
    fclose(file);
}

static double rate_beside(const char *name)
{
    for (unsigned int i = 0; i < neighbour_count; i++)
        if (!strncmp(neighbours[i].profile, name, 63))
            return neighbours[i].rate;
    return 1.0;
}

/* ---- the cards ---- */
static void open_card(int index)
{
    char path[sizeof node_dir + 16];
    struct stat st;
    snprintf(path, sizeof path, "%s/card%d", node_dir, index);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) || (size_t)st.st_size < sizeof(struct card))
        fail(path, fd < 0 ? strerror(errno) : "not a card of this version");
    void *map = mmap(NULL, sizeof(struct card), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED || memcmp(((struct card *)map)->magic, MAGIC, 8))
        fail(path, "not a card of this version");
    places[place_count++] = (struct place){fd, map, NULL};
}

/* The cards that CUDA_VISIBLE_DEVICES names, in its order, which is Slurm's: by index. */
static void open_cards(void)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (find_node() != OK)
        fail("GPUSHARE_EMU_DIR", "not set, or the node has no name");
    for (const char *at = visible && *visible ? visible : "0"; at && place_count < MAX_CARDS; at = strchr(at, ',')) {
        at += *at == ',';
        open_card(atoi(at));
    }
}

static int is_there(const struct slot *slot)
{
    return slot->join_us && !slot->leave_us && process_state(slot->pid, slot->start_ticks);
}

static uint64_t last_sample_us(const struct slot *slot)
{
    uint64_t head = __atomic_load_n(&slot->head, __ATOMIC_ACQUIRE);
    return head ? slot->ring[(head - 1) % RING].at_us : 0;
}

static uint64_t start_ticks(void)
{
    char text[1024];
    unsigned long long ticks = 0;
    int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[size > 0 ? size : 0] = 0;
    const char *rest = strrchr(text, ')');
    if (!rest || sscanf(rest + 1, " %*c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
                        &ticks) != 1)
        fail("/proc/self/stat", "cannot be read");
    return ticks;
}

/* Find a seat on a card; exit as PyTorch does where the memory does not fit. */
static void choose_seat(struct place *place)
{
    uint64_t used_mib = 0, oldest_us = UINT64_MAX;
    struct card *card = place->card;
    int clash = 0;
    for (unsigned int i = 0; i < SLOTS; i++) {
        struct slot *slot = &card->slot[i];
        if (is_there(slot)) {
            used_mib += slot->mem_mib;
            clash |= rate_beside(slot->profile) <= 0;
            continue;
        }
        /* The slot that ended longest ago, so that neighbours have seen its end. */
        uint64_t ended_us = !slot->join_us ? 0 : slot->leave_us ? slot->leave_us : last_sample_us(slot);
        if (ended_us < oldest_us)
            oldest_us = ended_us, place->seat = slot;
    }
    if (clash || used_mib + (uint64_t)mem_mib > card->mem_total_mib - card->mem_reserved_mib) {
        fprintf(stderr, "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate %.2f GiB (GPU %u)\n",
                mem_mib / 1024, card->index);
        exit(1);
    }
    if (!place->seat)
        fail("card", "all places are taken");
}

static void sit_down(struct slot *seat)
{
    double demand[6] = {gpu_pct, access_pct, 4 * gpu_pct, 0, 0, 0};
    __atomic_store_n(&seat->leave_us, 1, __ATOMIC_RELEASE); /* who looks meanwhile sees a stay that ended long ago */
    __atomic_store_n(&seat->join_us, 0, __ATOMIC_RELEASE);
    seat->pid = (uint32_t)getpid();
    seat->start_ticks = start_ticks();
    seat->mem_mib = (uint64_t)mem_mib;
    __atomic_store_n(&seat->head, 0, __ATOMIC_RELEASE);
    memcpy(seat->demand, demand, sizeof demand);
    strncpy(seat->profile, profile, sizeof seat->profile - 1);
    __atomic_store_n(&seat->leave_us, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&seat->join_us, joined_us, __ATOMIC_RELEASE);
}

/* Allocate the memory and sit down on every card at once, or on none. All lock the cards in the same order. */
static void join(void)
{
    for (unsigned int i = 0; i < place_count; i++)
        while (flock(places[i].fd, LOCK_EX) && errno == EINTR) {}
    for (unsigned int i = 0; i < place_count; i++)
        choose_seat(&places[i]);
    joined_us = now_us();
    for (unsigned int i = 0; i < place_count; i++)
        sit_down(places[i].seat);
    for (unsigned int i = 0; i < place_count; i++)
        flock(places[i].fd, LOCK_UN);
}

/* A reset empties the card under us. */
static int holds_seat(const struct slot *seat) { return seat->join_us == joined_us; }

static void leave(uint64_t at_us)
{
    for (unsigned int i = 0; i < place_count; i++)
        if (holds_seat(places[i].seat))
            __atomic_store_n(&places[i].seat->leave_us, at_us, __ATOMIC_RELEASE);
}

/* Everybody else who was there after `since_us`; who died or is suspended was last there when it published last. */
static unsigned int others(uint64_t since_us, struct stay out[MAX_CARDS * SLOTS])
{
    unsigned int n = 0;
    for (unsigned int i = 0; i < place_count * SLOTS; i++) {
        struct place *place = &places[i / SLOTS];
        struct slot *slot = &place->card->slot[i % SLOTS];
        uint64_t join_us = __atomic_load_n(&slot->join_us, __ATOMIC_ACQUIRE);
        if (slot == place->seat || !join_us)
            continue;
        uint64_t until_us = __atomic_load_n(&slot->leave_us, __ATOMIC_ACQUIRE);
        if (!until_us) {
            char state = process_state(slot->pid, slot->start_ticks);
            if (!state || state == 'T' || state == 't') {
                until_us = last_sample_us(slot);
                if (!until_us)
                    until_us = join_us;
            }
        }
        if (!until_us || until_us > since_us)
            out[n++] = (struct stay){i / SLOTS, join_us, until_us, rate_beside(slot->profile)};
    }
    return n;
}

/* ---- work ---- */
/* The speed on the slowest card: the others wait for it. */
static double rate_at(const struct stay *stays, unsigned int n, uint64_t at_us)
{
    double rate[MAX_CARDS], slowest = 1.0;
    for (unsigned int i = 0; i < place_count; i++)
        rate[i] = 1.0;
    for (unsigned int i = 0; i < n; i++)
        if (stays[i].since_us <= at_us && (!stays[i].until_us || at_us < stays[i].until_us))
            rate[stays[i].place] *= stays[i].rate > 0 ? stays[i].rate : 1.0;
    for (unsigned int i = 0; i < place_count; i++)
        slowest = least(slowest, rate[i]);
    return slowest;
}

/* The next moment after `at_us`, at most `to_us`, at which somebody comes or goes. */
static uint64_t next_edge(const struct stay *stays, unsigned int n, uint64_t at_us, uint64_t to_us)
{
    uint64_t next = to_us;
    for (unsigned int i = 0; i < n; i++) {
        if (stays[i].since_us > at_us && stays[i].since_us < next)
            next = stays[i].since_us;
        if (stays[i].until_us > at_us && stays[i].until_us < next)
            next = stays[i].until_us;
    }
    return next;
}

/* Work from *at_us to `to_us`, at most `limit_s`, each stretch at the speed that its neighbours allow; exact however
 * late we look, since neighbours are known by when they came and went. Returns the speed at the end. */
static double advance(uint64_t *at_us, uint64_t to_us, double limit_s, double *done_s)
{
    struct stay stays[MAX_CARDS * SLOTS];
    unsigned int n = others(*at_us, stays);
    double done = 0;
    while (*at_us < to_us) {
        uint64_t edge_us = next_edge(stays, n, *at_us, to_us);
        double rate = rate_at(stays, n, *at_us), piece_s = (double)(edge_us - *at_us) / 1e6 * rate;
        if (done + piece_s >= limit_s) {
            *at_us += (uint64_t)((limit_s - done) / rate * 1e6);
            *done_s += limit_s;
            return rate;
        }
        done += piece_s;
        *at_us = edge_us;
    }
    *done_s += done;
    return rate_at(stays, n, to_us);
}

/* ---- load ---- */
/* Work done in a phase from the first epoch's start to `at` epochs. */
static double spent(double at, double since, double length)
{
    return floor(at) * length + fmin(fmax(at - floor(at) - since, 0.0), length);
}

static double noise(void) { return 1 + NOISE * (2 * drand48() - 1); }

/* Show the mean load since the last time on every card, as NVML's samples do. */
static void publish(double begin_s, double end_s, double rate, uint64_t at_us)
{
    double begin = begin_s / epoch_s, end = fmax(end_s / epoch_s, begin + 1e-6), since = 0, gpu = 0, memory = 0, pcie = 0;
    for (unsigned int i = 0; i < sizeof PHASES / sizeof *PHASES; i++) {
        double length = PHASES[i].until - since;
        double share = (spent(end, since, length) - spent(begin, since, length)) / (end - begin);
        gpu += share * PHASES[i].gpu, memory += share * PHASES[i].memory, pcie += share * PHASES[i].pcie;
        since = PHASES[i].until;
    }
    for (unsigned int i = 0; i < place_count; i++) {
        struct slot *seat = places[i].seat;
        if (!holds_seat(seat))
            continue;
        double rx = 4 * gpu_pct * 1024 * pcie * rate * noise();
        seat->ring[seat->head % RING] = (struct sample){
            .at_us = at_us,
            .sm_pct = (float)least(100, gpu_pct * gpu * rate * noise()),
            .mem_pct = (float)least(100, access_pct * memory * rate * noise()),
            .tx_kb_s = (float)(0.2 * rx), .rx_kb_s = (float)rx, .rate = rate,
        };
        __atomic_store_n(&seat->head, seat->head + 1, __ATOMIC_RELEASE);
    }
}

static void tell_epoch(void)
{
    const char *path = getenv("GPUSHARE_EPOCH_FILE");
    int fd = path && *path ? open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644) : -1;
    if (fd >= 0) {
        futimens(fd, NULL); /* the file may be there already */
        close(fd);
    }
}

static void report(const char *how, uint64_t at_us, double done_s)
{
    double wall_s = (double)clock_us(CLOCK_REALTIME) / 1e6, now_s = (double)now_us() / 1e6;
    const char *node = getenv("SLURMD_NODENAME");
    printf("%s node=%s gpu=", how, node ? node : "");
    for (unsigned int i = 0; i < place_count; i++)
        printf("%s%u", i ? "," : "", places[i].card->index);
    printf(" joined_s=%.3f ended_s=%.3f work_s=%.3f\n", wall_s - now_s + (double)joined_us / 1e6,
           wall_s - now_s + (double)at_us / 1e6, done_s);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    sigset_t signals;
    if (argc != 8)
        fail("usage", "light_job WORK_S EPOCHS GPU_UTIL_PCT MEM_ACCESS_PCT MEM_MIB PROFILE RATES_FILE");
    work_s = atof(argv[1]), epoch_s = work_s / fmax(1, atof(argv[2]));
    gpu_pct = atof(argv[3]), access_pct = atof(argv[4]), mem_mib = atof(argv[5]), profile = argv[6];
    if (!(work_s > 0))
        fail("WORK_S", "must be positive");
    if (access(argv[7], R_OK))
        fail(argv[7], strerror(errno));
    read_rates(argv[7]);
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM), sigaddset(&signals, SIGINT), sigaddset(&signals, SIGCONT);
    sigprocmask(SIG_BLOCK, &signals, NULL); /* they end our sleep instead of interrupting a step */
    srand48(getpid());
    open_cards();
    join();

    double done_s = 0, published_s = 0, rate = 1.0;
    uint64_t at_us = joined_us, published_us = joined_us;
    int epoch_over = 0;
    publish(0, 0, 1.0, at_us);
    while (done_s < work_s) {
        double left_us = (work_s - done_s) / rate * 1e6 - (double)(now_us() - at_us);
        uint64_t wait_us = left_us < 0 ? 0 : left_us < TICK_US ? (uint64_t)left_us : TICK_US;
        struct timespec wait = {(time_t)(wait_us / 1000000), (long)(wait_us % 1000000 * 1000)};
        int got = sigtimedwait(&signals, NULL, &wait);
        uint64_t look_us = now_us();
        if (got == SIGCONT && look_us - at_us > 2 * TICK_US) { /* it was suspended: that time was not worked */
            at_us = published_us = look_us;
            published_s = done_s;
        }
        rate = advance(&at_us, look_us, work_s - done_s, &done_s);
        read_rates(argv[7]);
        if (work_s - done_s < 1e-6)
            done_s = work_s;
        if (got == SIGTERM || got == SIGINT) {
            leave(at_us);
            report("stopped", at_us, done_s);
            return 128 + got;
        }
        if (!epoch_over && done_s >= epoch_s) {
            epoch_over = 1;
            tell_epoch();
        }
        if (at_us - published_us >= SHORTEST_SAMPLE_US) {
            publish(published_s, done_s, (done_s - published_s) / ((double)(at_us - published_us) / 1e6), at_us);
            published_s = done_s, published_us = at_us;
        }
    }
    leave(at_us);
    report("done", at_us, done_s);
    return 0;
}
