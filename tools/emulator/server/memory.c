/*
 * memory.c - physical memory. A piece lives until the last object, dup, export and UVM mapping of
 * it is gone, which is what lets a process without any CUDA context own GPU memory by holding an
 * exported fd (K/mem_mgr/video_mem.c).
 */
#include "server.h"
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct memory *memory_new(struct gpu *gpu, uint64_t size)
{
	struct memory *m;

	if (gpu && size > gpu->board->total_bytes - gpu->board->used_bytes)
		return NULL;
	m = calloc(1, sizeof *m);
	if (!m)
		return NULL;
	*m = (struct memory){1, gpu, size, -1, ++S.next_memory};
	if (gpu)
		gpu->board->used_bytes += size;
	return m;
}

void memory_put(struct memory *m)
{
	if (--m->refs)
		return;
	if (m->gpu)
		m->gpu->board->used_bytes -= m->size;
	if (m->memfd >= 0)
		close(m->memfd);
	free(m);
}

/* A card promises nothing of what new memory holds. */
static bool poison(const struct memory *m)
{
	uint8_t some[65536];
	uint64_t at = 0;

	if (!knob(K_poison))
		return true;
	memset(some, (int)knob(K_poison), sizeof some);
	while (at < m->size) {
		size_t length = m->size - at < sizeof some ? (size_t)(m->size - at) : sizeof some;

		if (pwrite(m->memfd, some, length, (off_t)at) != (ssize_t)length)
			return false;
		at += length;
	}
	return true;
}

int memory_fd(struct memory *m)
{
	if (m->memfd < 0) {
		m->memfd = memfd_create("valve-emu-memory", MFD_CLOEXEC);
		if (m->memfd >= 0 && (ftruncate(m->memfd, (off_t)m->size) || !poison(m))) {
			close(m->memfd);
			m->memfd = -1;
		}
	}
	return m->memfd < 0 ? -1 : fcntl(m->memfd, F_DUPFD_CLOEXEC, 0);
}
