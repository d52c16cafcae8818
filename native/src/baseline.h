/* Decoder for baseline JPEGs (nearly all are), bit-identical to libjpeg-turbo but faster: Huffman codes, which take two
   thirds of libjpeg's time, cost one lookup each, and blocks outside the region are skipped without being decoded. */
#ifndef STOKER_BASELINE_H
#define STOKER_BASELINE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

#include "crop.h"

/* A rectangle of pixels; `right` and `bottom` are exclusive. */
struct baseline_region {
    int left, top, right, bottom;
};

typedef struct baseline_decoder baseline_decoder;

/* Create a decoder, to be used by one thread at a time; NULL if out of memory. */
baseline_decoder *baseline_new(void);
void baseline_free(baseline_decoder *decoder);

/* Whether this CPU has the instructions it needs. */
int baseline_is_supported(void);

/* Decode a region of an image whose header libjpeg has read, into RGB rows `stride` bytes apart. Up to 45 bytes past
   the end of each row, the last one included, may be overwritten. CROP_UNSUPPORTED means: let libjpeg decode it. */
enum crop_status baseline_decode(baseline_decoder *decoder, const struct jpeg_decompress_struct *jpeg,
                                 const struct baseline_region *region, uint8_t *pixels, size_t stride);

#endif
