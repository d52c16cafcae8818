/* libFuzzer's entry point: the first 8 bytes choose crop, side and filter, the rest is the JPEG. With -DREPLAY a main()
   that runs the files it is given, for valgrind and for compilers without libFuzzer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../src/crop.h"

#define CHOICES 8

/* Decode the same twice, with one decoder that saw other images before, and with and without SIMD. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static crop_decoder *decoders[2];
    if (size < CHOICES) return 0;
    const uint8_t *jpeg = data + CHOICES;
    size -= CHOICES;
    struct crop_look found;
    int width = 64, height = 64;
    if (crop_look(jpeg, size, &found) == CROP_OK) width = found.width, height = found.height;
    struct crop_box box = {data[0] / 256.0 * width, data[1] / 256.0 * height, 0, 0};
    box.width = (data[2] + 1) / 256.0 * (width - box.left);
    box.height = (data[3] + 1) / 256.0 * (height - box.top);
    if (data[4] & 4) { /* whole pixels, as a training crop has them */
        box.left = (int)box.left, box.top = (int)box.top;
        box.width = (int)box.width + 1, box.height = (int)box.height + 1;
    }
    int side = 1 + (data[5] | (data[6] & 1) << 8);
    size_t bytes = (size_t)side * (size_t)side * 3;
    uint8_t *out = malloc(2 * bytes);
    enum crop_status status[2];
    for (int simd = 0; simd < 2; simd++) {
        if (!decoders[simd]) decoders[simd] = crop_new(simd);
        status[simd] = crop_fill(decoders[simd], jpeg, size, &box, data[4] & 1, data[4] & 2, side, out + (size_t)simd * bytes);
    }
    if (status[0] != status[1] || (status[0] == CROP_OK && memcmp(out, out + bytes, bytes))) abort();
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
        uint8_t *exact = malloc(size ? size : 1); /* so that a read beyond the end is seen */
        memcpy(exact, data, size);
        free(data);
        LLVMFuzzerTestOneInput(exact, size);
        free(exact);
    }
    printf("%d files\n", count - 1);
    return 0;
}
#endif
