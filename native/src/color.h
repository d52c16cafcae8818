/* Chroma upsampling and YCbCr to RGB conversion of one row: bit-identical to libjpeg-turbo's, with AVX2. */
#ifndef STOKER_COLOR_H
#define STOKER_COLOR_H

#include <stdint.h>

/* Upsample `count` chroma samples to image resolution with libjpeg's triangle filter ("fancy upsampling"): three parts
   from the nearer sample, one from the farther. `next_row` is the row to blend with, NULL if the rows have full
   vertical resolution; `horizontal` doubles the width too. Reads one sample on either side. */
void upsample_row(const uint8_t *row, const uint8_t *next_row, int count, int horizontal, int bias,
                  uint8_t *restrict out);

/* Convert a row to RGB, 16 pixels at a time; `cb` and `cr` are NULL for a grayscale image. */
void ycc_to_rgb(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, int count, uint8_t *out);

#endif
