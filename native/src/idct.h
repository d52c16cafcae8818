/* The inverse DCT of 8x8 blocks: bit-identical to libjpeg-turbo's JDCT_ISLOW, with AVX2. */
#ifndef STOKER_IDCT_H
#define STOKER_IDCT_H

#include <stddef.h>
#include <stdint.h>

#define BLOCK_SIDE 8

/* Dequantize and transform 64 coefficients, in natural order, into 8 rows of samples `stride` bytes apart. */
void idct_block(const int16_t *coefficients, const int16_t *quant, uint8_t *out, size_t stride);

/* The same for a block of which only the DC coefficient is not zero. */
void idct_dc_only(int dc, int quant, uint8_t *out, size_t stride);

#endif
