/* Huffman decoding of a baseline JPEG scan: a bit reader, and tables that resolve most codes with one lookup.
   The hot path is inline; huffman.c builds the tables and handles the rare cases. */
#ifndef STOKER_HUFFMAN_H
#define STOKER_HUFFMAN_H

#include <stdint.h>

#include "avx2.h"

/* A decoded symbol in one word. Bits 0-5: length of the code and the value behind it; 8-15: length of the code;
   16-23: length of the value; 24-31: by how much the coefficient index advances. */
typedef uint32_t huffman_entry;

#ifdef HAVE_AVX2
#include <stdio.h>
#include <string.h>

#include <jpeglib.h>

#define HUFFMAN_LOOKUP_BITS 10 /* codes up to this length are resolved by one lookup */

#define HUFFMAN_ENTRY(code_length, value_length, advance) \
    ((huffman_entry)((code_length) + (value_length)) | (huffman_entry)(code_length) << 8 | \
     (huffman_entry)(value_length) << 16 | (huffman_entry)(advance) << 24)
#define HUFFMAN_LONG_CODE 0 /* entry of a code that is longer than HUFFMAN_LOOKUP_BITS */
#define HUFFMAN_INVALID 64  /* advance of an invalid code: past the end of the block */
#define HUFFMAN_EOB 128     /* advance of the end-of-block code */

struct huffman_table {
    uint8_t bits[17], values[256]; /* the DHT segment it was built from */
    int built;
    huffman_entry lookup[1 << HUFFMAN_LOOKUP_BITS];
    uint32_t limit[17]; /* by code length: the first 16-bit prefix beyond its codes */
    int offset[17];     /* by code length: index of a code's value, minus the code */
};

/* The bits of a scan, next bit on top. Past the end it supplies zeros and counts them in `padding`. */
struct bit_reader {
    const uint8_t *next, *end;
    uint64_t bits;
    int count, padding;
};

/* Build a table unless it was built from the same segment before; return NULL if libjpeg would reject it. */
const struct huffman_table *huffman_build_table(struct huffman_table *table, const JHUFF_TBL *source, int is_dc);

/* Return the entry of a code that is longer than HUFFMAN_LOOKUP_BITS. */
huffman_entry huffman_lookup_long(const struct huffman_table *table, uint64_t bits, int is_dc);

/* Refill to 56 bits or more, one byte at a time: handles stuffed zeros, markers and the end of the data. */
void bit_reader_refill_bytes(struct bit_reader *reader);

/* Refill to 56 bits or more, eight bytes at once if none is 0xFF. The state is passed apart from the struct so that
   the compiler keeps it in registers. */
AVX2_BMI2_INLINE void bit_reader_refill(struct bit_reader *reader, const uint8_t **next, uint64_t *bits, int *count) {
    uint64_t word;
    if (__builtin_expect(reader->end - *next >= 8, 1)) {
        memcpy(&word, *next, 8);
        if (__builtin_expect(!((~word - 0x0101010101010101u) & word & 0x8080808080808080u), 1)) {
            *bits |= __builtin_bswap64(word) >> *count;
            *next += (63 - *count) >> 3;
            *count |= 56;
            return;
        }
    }
    reader->next = *next, reader->bits = *bits, reader->count = *count;
    bit_reader_refill_bytes(reader);
    *next = reader->next, *bits = reader->bits, *count = reader->count;
}

AVX2_BMI2_INLINE huffman_entry huffman_lookup(const struct huffman_table *table, uint64_t bits, int is_dc) {
    huffman_entry entry = table->lookup[bits >> (64 - HUFFMAN_LOOKUP_BITS)];
    return __builtin_expect(entry == HUFFMAN_LONG_CODE, 0) ? huffman_lookup_long(table, bits, is_dc) : entry;
}

/* Return the signed value behind a code (EXTEND in the JPEG standard). */
AVX2_BMI2_INLINE int huffman_extend(uint64_t bits, huffman_entry entry) {
    uint64_t value = bits << ((entry >> 8) & 63);
    int length = (entry >> 16) & 15;
    int negative = (int)~((int64_t)value >> 63); /* values whose first bit is zero */
    return (int)(value >> 1 >> (63 - length)) + (negative & (1 - (1 << length)));
}

#endif
#endif
