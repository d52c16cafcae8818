/* libFuzzer entry point: the first bytes select crop, side and filter, the rest is the JPEG. -DREPLAY adds a main()
   that runs the files named on the command line, for valgrind and for compilers without libFuzzer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../src/crop.h"

#define OPTION_BYTES 7

/* Decode with a decoder that has decoded other images before, with a new one, and with libjpeg and portable code alone.
   The first two must agree; an image that libjpeg reports as damaged must not succeed; if both succeed, the bytes must
   be equal. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static crop_decoder *reused;
    if (size < OPTION_BYTES) return 0;
    const uint8_t *jpeg = data + OPTION_BYTES;
    size -= OPTION_BYTES;
    struct crop_header header;
    int width = 64, height = 64;
    if (crop_read_header(jpeg, size, &header) == CROP_OK) width = header.width, height = header.height;
    struct crop_box box = {data[0] / 256.0 * width, data[1] / 256.0 * height, 0, 0, width, height};
    box.width = (data[2] + 1) / 256.0 * (width - box.left);
    box.height = (data[3] + 1) / 256.0 * (height - box.top);
    if (data[4] & 4) { /* whole pixels, as in training crops */
        box.left = (int)box.left, box.top = (int)box.top;
        box.width = (int)box.width + 1, box.height = (int)box.height + 1;
    }
    int side = 1 + (data[5] | (data[6] & 1) << 8);
    size_t bytes = (size_t)side * (size_t)side * 3;
    uint8_t *out = malloc(3 * bytes);
    crop_decoder *fresh = crop_new(1), *portable = crop_new(0);
    if (!reused) reused = crop_new(1);
    if (!out || !fresh || !portable || !reused) abort();
    crop_decoder *decoders[] = {reused, fresh, portable};
    enum crop_status status[3];
    for (int i = 0; i < 3; i++)
        status[i] = crop_decode(decoders[i], jpeg, size, &box, data[4] & 1, data[4] & 2, side, out + (size_t)i * bytes);
    if (status[0] != status[1]) abort();
    if (status[0] == CROP_OK && memcmp(out, out + bytes, bytes)) abort();
    if (status[0] == CROP_OK && status[2] == CROP_DAMAGED) abort();
    if (status[0] == CROP_OK && status[2] == CROP_OK && memcmp(out, out + 2 * bytes, bytes)) abort();
    crop_free(fresh);
    crop_free(portable);
    free(out);
    return 0;
}

#ifdef REPLAY
int main(int count, char **names) {
    for (int i = 1; i < count; i++) {
        FILE *file = fopen(names[i], "rb");
        if (!file) return 2;
        uint8_t *data = malloc((size_t)16 << 20);
        size_t size = fread(data, 1, (size_t)16 << 20, file);
        fclose(file);
        uint8_t *exact = malloc(size ? size : 1); /* sized exactly, so that a read past the end is detected */
        memcpy(exact, data, size);
        free(data);
        LLVMFuzzerTestOneInput(exact, size);
        free(exact);
    }
    printf("%d files\n", count - 1);
    return 0;
}
#endif
