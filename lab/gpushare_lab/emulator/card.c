/* Reading an emulated node: its card files, the processes on them, and the faults that tests ask for. */
#define _GNU_SOURCE
#include "card.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct card *cards[MAX_CARDS];
unsigned int card_count;
char node_dir[3072];

/* ---- time ---- */
uint64_t clock_us(int clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

/* ---- faults ---- */
static void nap(double seconds)
{
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
}

result fault(const char *function)
{
    char path[sizeof node_dir + 8], line[160], name[96], what[32];
    double seconds;
    for (double hung = 0;; hung += 0.05) { /* a hang ends when its line is taken away */
        snprintf(path, sizeof path, "%s/fault", node_dir);
        FILE *file = fopen(path, "re");
        if (!file)
            return OK;
        int hangs = 0, code = OK;
        while (fgets(line, sizeof line, file) && !hangs && code == OK) {
            int fields = sscanf(line, "%95s %31s %lf", name, what, &seconds);
            if (fields < 2 || (strcmp(name, "*") && strncmp(function, name, strlen(name))))
                continue;
            if (strcmp(what, "hang"))
                code = atoi(what);
            else
                hangs = fields < 3 || hung < seconds;
        }
        fclose(file);
        if (!hangs)
            return code;
        nap(0.05);
    }
}

/* ---- opening the node ---- */
static const char *node_name(void)
{
    const char *name = getenv("SLURMD_NODENAME");
    if (!name || !*name)
        name = getenv("GPUSHARE_EMU_NODE");
    return name && *name && !strchr(name, '/') ? name : NULL;
}

static struct card *map_card(unsigned int index)
{
    char path[sizeof node_dir + 16];
    struct stat st;
    void *map = MAP_FAILED;
    snprintf(path, sizeof path, "%s/card%u", node_dir, index);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    if (!fstat(fd, &st) && (size_t)st.st_size >= sizeof(struct card))
        map = mmap(NULL, sizeof(struct card), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (map == MAP_FAILED)
        return NULL;
    if (memcmp(((struct card *)map)->magic, MAGIC, 8)) {
        munmap(map, sizeof(struct card));
        return NULL;
    }
    return map;
}

result find_node(void)
{
    const char *dir = getenv("GPUSHARE_EMU_DIR"), *node = node_name();
    if (!dir || !*dir || !node || snprintf(node_dir, sizeof node_dir, "%s/%s", dir, node) >= (int)sizeof node_dir)
        return DRIVER_NOT_LOADED;
    return OK;
}

void map_cards(void)
{
    for (card_count = 0; card_count < MAX_CARDS; card_count++)
        if (!(cards[card_count] = map_card(card_count)))
            break;
}

void unmap_cards(void)
{
    while (card_count > 0)
        munmap(cards[--card_count], sizeof(struct card));
}

/* ---- who is on a card, and how busy they are ---- */
/* State letter of a process that is the very one that joined, or 0. */
char process_state(uint32_t pid, uint64_t start_ticks)
{
    char path[32], text[1024], state;
    unsigned long long ticks;
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0)
        return 0;
    text[size] = 0;
    const char *rest = strrchr(text, ')'); /* the name between parentheses may hold anything */
    if (!rest || sscanf(rest + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
                        &state, &ticks) != 2)
        return 0;
    return ticks == start_ticks && state != 'Z' && state != 'X' ? state : 0;
}


/* One entry for each live process; its load is the mean of its samples after `since_us` that are at most `window_us`
 * older than its newest, however long ago that was: a job that a busy machine keeps from publishing still trains. */
unsigned int loads(const struct card *card, uint64_t since_us, uint64_t window_us, struct load out[SLOTS])
{
    unsigned int n = 0;
    for (unsigned int i = 0; i < SLOTS; i++) {
        const struct slot *slot = &card->slot[i];
        uint64_t join_us = __atomic_load_n(&slot->join_us, __ATOMIC_ACQUIRE);
        if (!join_us || __atomic_load_n(&slot->leave_us, __ATOMIC_ACQUIRE))
            continue;
        struct load load = {.pid = slot->pid, .server = slot->server, .mem_mib = slot->mem_mib};
        char state = process_state(slot->pid, slot->start_ticks);
        if (!state)
            continue;
        uint64_t head = __atomic_load_n(&slot->head, __ATOMIC_ACQUIRE), used = 0;
        /* The oldest entry may be overwritten while we look: keep well away from it. */
        for (uint64_t k = 1; k <= head && k <= RING / 2; k++) {
            const struct sample *s = &slot->ring[(head - k) % RING];
            if (k == 1)
                load.at_us = s->at_us;
            if (s->at_us <= since_us || s->at_us + window_us < load.at_us)
                break;
            load.sm_pct += s->sm_pct, load.mem_pct += s->mem_pct, load.tx_kb_s += s->tx_kb_s, load.rx_kb_s += s->rx_kb_s;
            used++;
        }
        if (used > 1)
            load.sm_pct /= used, load.mem_pct /= used, load.tx_kb_s /= used, load.rx_kb_s /= used;
        if ((state == 'T' || state == 't') && load.at_us + window_us < clock_us(CLOCK_MONOTONIC)) /* it only holds memory */
            load.sm_pct = load.mem_pct = load.tx_kb_s = load.rx_kb_s = 0;
        out[n++] = load;
    }
    return n;
}

/* What those who have left the card a moment ago did there in the last `window_us`, as part of that time. */
static double left_lately_pct(const struct card *card, uint64_t window_us)
{
    uint64_t since_us = clock_us(CLOCK_MONOTONIC) - window_us;
    double pct = 0;
    for (unsigned int i = 0; i < SLOTS; i++) {
        const struct slot *slot = &card->slot[i];
        uint64_t from_us = slot->join_us, until_us = __atomic_load_n(&slot->leave_us, __ATOMIC_ACQUIRE), head = slot->head;
        if (!from_us || until_us <= since_us || !head)
            continue;
        from_us = from_us > since_us ? from_us : since_us;
        pct += slot->ring[(head - 1) % RING].sm_pct * (until_us > from_us ? until_us - from_us : 0) / window_us;
    }
    return pct;
}

/* The whole card now: what its processes do together, never more than the card can. */
struct load total(const struct card *card, uint64_t window_us)
{
    struct load each[SLOTS], sum = {0};
    unsigned int n = loads(card, 0, window_us, each);
    for (unsigned int i = 0; i < n; i++) {
        sum.pid++;
        sum.mem_mib += each[i].mem_mib;
        sum.sm_pct += each[i].sm_pct, sum.mem_pct += each[i].mem_pct;
        sum.tx_kb_s += each[i].tx_kb_s, sum.rx_kb_s += each[i].rx_kb_s;
    }
    sum.sm_pct += left_lately_pct(card, window_us);
    sum.sm_pct = least(sum.sm_pct, 100), sum.mem_pct = least(sum.mem_pct, 100);
    return sum;
}
