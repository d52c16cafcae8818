/* Baseline JPEGs, as nearly all are, decoded to the same pixels as libjpeg's but faster. Two thirds of libjpeg's time
   goes to Huffman codes: here each takes one step, and those outside the wanted part are passed over unvalued. */
#ifndef STOKER_BASELINE_H
#define STOKER_BASELINE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

#include "crop.h"

/* Pixels from (left, top) up to (right, bottom), which lie outside. */
struct baseline_part {
    int left, top, right, bottom;
};

typedef struct baseline_decoder baseline_decoder;

/* One for each thread; NULL if there is no memory. */
baseline_decoder *baseline_new(void);
void baseline_free(baseline_decoder *decoder);

/* Whether this processor has what it needs. */
int baseline_runs_here(void);

/* Decode a part of an image whose header libjpeg has read, into RGB rows of `stride` bytes; up to 45 bytes behind each
   may be written, behind the last one too. CROP_UNSUPPORTED leaves it to libjpeg. */
enum crop_status baseline_decode(baseline_decoder *decoder, const struct jpeg_decompress_struct *jpeg,
                                 const struct baseline_part *part, uint8_t *pixels, size_t stride);

#endif
