/* libFuzzer's entry point: the first bytes choose crop, side and filter, the rest is the JPEG. With -DREPLAY a main()
   that runs the files it is given, for valgrind and for compilers without libFuzzer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../src/crop.h"

#define CHOICES 7

/* Decode the same by a decoder that saw other images before, by a new one, and by libjpeg and portable code alone. The
   first two must agree, what libjpeg calls damaged must not pass, and what both pass must be the same bytes. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static crop_decoder *old;
    if (size < CHOICES) return 0;
    const uint8_t *jpeg = data + CHOICES;
    size -= CHOICES;
    struct crop_look found;
    int width = 64, height = 64;
    if (crop_look(jpeg, size, &found) == CROP_OK) width = found.width, height = found.height;
    struct crop_box box = {data[0] / 256.0 * width, data[1] / 256.0 * height, 0, 0, width, height};
    box.width = (data[2] + 1) / 256.0 * (width - box.left);
    box.height = (data[3] + 1) / 256.0 * (height - box.top);
    if (data[4] & 4) { /* whole pixels, as a training crop has them */
        box.left = (int)box.left, box.top = (int)box.top;
        box.width = (int)box.width + 1, box.height = (int)box.height + 1;
    }
    int side = 1 + (data[5] | (data[6] & 1) << 8);
    size_t bytes = (size_t)side * (size_t)side * 3;
    uint8_t *out = malloc(3 * bytes);
    crop_decoder *fresh = crop_new(1), *plain = crop_new(0);
    if (!old) old = crop_new(1);
    if (!out || !fresh || !plain || !old) abort();
    crop_decoder *decoders[] = {old, fresh, plain};
    enum crop_status found_by[3];
    for (int i = 0; i < 3; i++)
        found_by[i] = crop_fill(decoders[i], jpeg, size, &box, data[4] & 1, data[4] & 2, side, out + (size_t)i * bytes);
    if (found_by[0] != found_by[1]) abort();
    if (found_by[0] == CROP_OK && memcmp(out, out + bytes, bytes)) abort();
    if (found_by[0] == CROP_OK && found_by[2] == CROP_DAMAGED) abort();
    if (found_by[0] == CROP_OK && found_by[2] == CROP_OK && memcmp(out, out + 2 * bytes, bytes)) abort();
    crop_free(fresh);
    crop_free(plain);
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
