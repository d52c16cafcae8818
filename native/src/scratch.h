/* Growable scratch memory, reused from one image to the next. */
#ifndef STOKER_SCRATCH_H
#define STOKER_SCRATCH_H

#include <stddef.h>

struct scratch {
    void *start;
    size_t bytes;
};

/* Return at least `bytes` of memory, or NULL if allocation fails. Growing discards the content; new memory is zero. */
void *scratch_reserve(struct scratch *scratch, size_t bytes);
void scratch_free(struct scratch *scratch);

/* Free the memory if it is too large to keep for the next image. */
void scratch_trim(struct scratch *scratch);

#endif
