#include "huffman.h"

#ifdef HAVE_AVX2

static huffman_entry symbol_entry(int symbol, int code_length, int is_dc) {
    int run = symbol >> 4, size = symbol & 15;
    if (is_dc && symbol > 11) return HUFFMAN_ENTRY(code_length, 0, HUFFMAN_INVALID);
    if (is_dc) return HUFFMAN_ENTRY(code_length, symbol, 0);
    if (size == 0) return HUFFMAN_ENTRY(code_length, 0, run == 15 ? 16 : HUFFMAN_EOB);
    return size > 10 ? HUFFMAN_ENTRY(code_length, 0, HUFFMAN_INVALID) : HUFFMAN_ENTRY(code_length, size, run + 1);
}

const struct huffman_table *huffman_build_table(struct huffman_table *table, const JHUFF_TBL *source, int is_dc) {
    if (table->built && !memcmp(table->bits, source->bits, sizeof table->bits) &&
        !memcmp(table->values, source->huffval, sizeof table->values))
        return table;
    memcpy(table->bits, source->bits, sizeof table->bits);
    memcpy(table->values, source->huffval, sizeof table->values);
    memset(table->lookup, HUFFMAN_LONG_CODE, sizeof table->lookup);
    table->built = 0;
    uint32_t code = 0;
    int index = 0;
    for (int length = 1; length <= 16; length++, code <<= 1) {
        int count = table->bits[length];
        if (index + count > 256 || code + (uint32_t)count >= 1u << length) return NULL; /* no code may be all ones */
        table->offset[length] = index - (int)code;
        for (int i = 0; i < count; i++, index++, code++) {
            if (is_dc && table->values[index] > 15) return NULL;
            if (length > HUFFMAN_LOOKUP_BITS) continue;
            huffman_entry entry = symbol_entry(table->values[index], length, is_dc);
            uint32_t copies = 1u << (HUFFMAN_LOOKUP_BITS - length);
            for (uint32_t k = 0; k < copies; k++) table->lookup[code * copies + k] = entry;
        }
        table->limit[length] = code << (16 - length);
    }
    table->built = 1;
    return table;
}

huffman_entry huffman_lookup_long(const struct huffman_table *table, uint64_t bits, int is_dc) {
    uint32_t top = (uint32_t)(bits >> 48);
    for (int length = HUFFMAN_LOOKUP_BITS + 1; length <= 16; length++)
        if (top < table->limit[length])
            return symbol_entry(table->values[table->offset[length] + (int)(top >> (16 - length))], length, is_dc);
    return HUFFMAN_ENTRY(1, 0, HUFFMAN_INVALID);
}

void bit_reader_refill_bytes(struct bit_reader *reader) {
    while (reader->count < 56) {
        const uint8_t *next = reader->next;
        uint64_t byte = 0;
        if (next < reader->end && (*next != 0xFF || (reader->end - next > 1 && next[1] == 0))) {
            byte = *next;
            reader->next += byte == 0xFF ? 2 : 1; /* a stuffed zero follows 0xFF */
        } else {
            reader->padding += 8;
        }
        reader->bits |= byte << (56 - reader->count);
        reader->count += 8;
    }
}

#endif
