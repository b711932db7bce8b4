// Calls one function of cpu.c, or of int8_kv.c with -DINT8_KV, for a test in another process, as an ARM processor under qemu-user does.
//
// stdin: the function's name in 32 bytes, the number of arguments, and for each its kind, 'p', 'i' or 'f', and 8 bytes: the
// number of bytes at a pointer (-1: NULL), which follow; an integer; a float. stdout: what then lies at the pointers.
//
// Integers and pointers go to x0 … x7 and then the stack, floats to s0 and s1, in whatever order a function names them, and
// what it does not take does no harm. So one prototype calls all.

#ifdef INT8_KV
#include "int8_kv.c"
#else
#include "cpu.c"
#endif
#include <stdio.h>

#define MOST 20
typedef void function(long, long, long, long, long, long, long, long, long, long, long, long, long, long, long, long, long,
                      long, long, long, float, float);
static const struct { const char *name; void *address; } functions[] = {
    {"store_kv", store_kv}, {"attend", attend},
#ifndef INT8_KV
    {"linear", linear}, {"gated_linear", gated_linear}, {"rms_norm", rms_norm}, {"argmax", argmax},
#endif
};

static int two(void) { return 2; }

static void read_all(void *to, long size) {
    if (fread(to, 1, size, stdin) != (size_t)size) exit(2);
}

int main(void) {
    char name[32];
    long count, num_longs = 0, num_floats = 0, num_pointers = 0, longs[MOST] = {0}, sizes[MOST];
    float floats[2] = {0};
    void *pointers[MOST];
    join_team(NULL, two, NULL, 0);
    read_all(name, sizeof name);
    read_all(&count, sizeof count);
    for (long i = 0; i < count; i++) {
        char kind;
        union { long integer; double number; } value;
        read_all(&kind, 1);
        read_all(&value, sizeof value);
        if (kind == 'f') floats[num_floats++] = value.number;
        else if (kind == 'i') longs[num_longs++] = value.integer;
        else if (value.integer < 0) longs[num_longs++] = 0;
        else {
            void *memory = aligned_alloc(64, (value.integer + 127) / 64 * 64);
            read_all(memory, value.integer);
            sizes[num_pointers] = value.integer;
            pointers[num_pointers++] = memory;
            longs[num_longs++] = (long)memory;
        }
    }
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        if (strcmp(name, functions[i].name)) continue;
        long *a = longs;
        ((function *)functions[i].address)(
            a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16],
            a[17], a[18], a[19], floats[0], floats[1]);
        for (int p = 0; p < num_pointers; p++) fwrite(pointers[p], 1, sizes[p], stdout);
        return 0;
    }
    return 3;
}
