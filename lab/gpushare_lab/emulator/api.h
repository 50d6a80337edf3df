/* What every function of the library begins with. */
#ifndef GPUSHARE_API_H
#define GPUSHARE_API_H

#include "card.h"

#define API __attribute__((visibility("default")))

extern int references; /* nvmlInit calls that no nvmlShutdown has answered */

/* Refuse before nvmlInit, and do what a test's fault wants of this function. */
#define BEGIN                                                                                                         \
    do {                                                                                                              \
        if (references == 0)                                                                                          \
            return UNINITIALIZED;                                                                                     \
        result bad_ = fault(__func__);                                                                                \
        if (bad_)                                                                                                     \
            return bad_;                                                                                              \
    } while (0)

/* The same, for a function of one device. */
#define DEVICE                                                                                                        \
    do {                                                                                                              \
        BEGIN;                                                                                                        \
        if (!known(card))                                                                                             \
            return INVALID_ARGUMENT;                                                                                  \
    } while (0)

static inline int known(const struct card *card)
{
    for (unsigned int i = 0; i < card_count; i++)
        if (cards[i] == card)
            return 1;
    return 0;
}

static inline unsigned int whole(double value) { return (unsigned int)(value + 0.5); }

#define SHORT_WINDOW_US 600000 /* NVML's own sample period is 1/6 to 1 s */
#define LONG_WINDOW_US 6000000

#endif
