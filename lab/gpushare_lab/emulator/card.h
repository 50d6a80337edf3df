/* The card files that emulated jobs write (layout.py has the same layout), and what can be read from them. */
#ifndef GPUSHARE_CARD_H
#define GPUSHARE_CARD_H

#include <stdint.h>

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999
};
typedef int result;

#define MAGIC "GSCARD01"
#define SLOTS 32
#define RING 56
#define MIB (1024ULL * 1024ULL)

struct sample { uint64_t at_us; float sm_pct, mem_pct, tx_kb_s, rx_kb_s; double rate; };
struct slot {
    uint32_t pid, server; /* of MPS, if it is that one's client */
    uint64_t start_ticks, join_us, leave_us, mem_mib, head;
    double demand[6];
    char profile[64];
    char reserved[96];
    struct sample ring[RING];
};
struct card {
    char magic[8];
    uint32_t index, slots, slot_bytes, compute_mode;
    uint64_t mem_total_mib, mem_reserved_mib;
    uint32_t power_limit_w, power_idle_w;
    char name[96], uuid[48], bus_id[32];
    char reserved[3872];
    struct slot slot[SLOTS];
};
_Static_assert(sizeof(struct slot) == 2048, "layout.py expects slots of 2048 bytes");
_Static_assert(__builtin_offsetof(struct slot, ring) == 256, "layout.py expects the ring at 256");
_Static_assert(__builtin_offsetof(struct card, slot) == 4096, "layout.py expects the first slot at 4096");

/* What one process does, or all of a card together (then `pid` counts them). */
struct load { uint32_t pid, server; uint64_t at_us, mem_mib; double sm_pct, mem_pct, tx_kb_s, rx_kb_s; };

#define MAX_CARDS 16
extern struct card *cards[MAX_CARDS];
extern unsigned int card_count;
extern char node_dir[3072];

result find_node(void);                     /* sets node_dir from the environment */
void map_cards(void);                       /* fills cards[] from node_dir */
void unmap_cards(void);
result fault(const char *function);         /* what the node's fault file wants of this call; may hang */
uint64_t clock_us(int clock);
char process_state(uint32_t pid, uint64_t start_ticks); /* a letter; 0 if that very process is gone */
unsigned int loads(const struct card *card, uint64_t since_us, uint64_t window_us, struct load out[SLOTS]);
struct load total(const struct card *card, uint64_t window_us);

static inline double least(double a, double b) { return a < b ? a : b; }

#endif
