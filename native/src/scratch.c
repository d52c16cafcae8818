#include "scratch.h"

#include <stdlib.h>

#define MAX_KEPT_BYTES ((size_t)16 << 20)

void *scratch_reserve(struct scratch *scratch, size_t bytes) {
    if (bytes > scratch->bytes) {
        scratch_free(scratch);
        scratch->start = calloc(1, bytes);
        scratch->bytes = scratch->start ? bytes : 0;
    }
    return scratch->start;
}

void scratch_free(struct scratch *scratch) {
    free(scratch->start);
    scratch->start = NULL;
    scratch->bytes = 0;
}

void scratch_trim(struct scratch *scratch) {
    if (scratch->bytes > MAX_KEPT_BYTES) scratch_free(scratch);
}
