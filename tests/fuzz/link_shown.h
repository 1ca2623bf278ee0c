/*
 * link_shown.h - for fuzz_link.c: a thread that shows a file which the kernel does not pass, and a valved that fetches it by number.
 * Included by link_events.h, whose valved it is.
 */
#ifndef VALVE_FUZZ_LINK_SHOWN_H
#define VALVE_FUZZ_LINK_SHOWN_H

static void answer(uint32_t seq, uint32_t status);
static bool shown_is_heard(void); /* valved reads what comes */

/* ---- a descriptor that the process shows, by a thread that waits for the answer ---- */
static struct {
	enum { FETCHES, FAILS, IS_SLOW, FORGETS } how; /* valved */
	int number;
	const struct kernel_file *file;
	uint32_t seq, mark;
	bool waits, reads;        /* the thread waits; and the session reads meanwhile */
	bool is_fetched, is_told; /* on this link: that nothing can be fetched, and the session has read it */
	bool is_said;             /* and it has not */
} shown;

/* What has the mark is the file that was meant, whenever valved looks. */
static void fetch_shown(void)
{
	int signal;
	const struct kernel_file *file = kernel_look(shown.number, &signal);
	uint32_t seq = shown.seq;
	bool is_right = file && (!shown.mark || signal == (int)shown.mark) && shown.how != FAILS;

	shown.seq = 0;
	if (!seq)
		return;
	CHECK(!is_right || !shown.mark || file == shown.file);
	CHECK(!shown.waits || !file || file == shown.file); /* it is open for as long as the thread waits */
	shown.is_fetched = is_right;
	shown.is_said |= !is_right;
	answer(seq, is_right ? 0 : VALVE_LINK_UNFETCHED);
}

static void hear_lent(const struct valve_link_header *header, uint32_t bytes)
{
	const uint32_t *end = (const void *)((const unsigned char *)header + bytes);
	int signal;

	kernel_look(shown.number, &signal);
	CHECK(!shown.is_told && shown.waits && end[-1] == 1 && (int)end[-3] == shown.number);
	CHECK((end[-2] != 0) == ((header->type & ~VALVE_LINK_LENT) == VALVE_LINK_KV_DONE));
	CHECK(!end[-2] || signal == (int)end[-2]); /* before the number is said */
	shown.seq = header->seq;
	shown.mark = end[-2];
	if (shown.how < IS_SLOW)
		fetch_shown();
}

/* A file of the application's or one of the shim's own, where the kernel passes none. */
static void app_shows(uint32_t detail)
{
	struct valve_link_rm_client client = {.has_fd = 1};
	struct valve_link_kv_done done = {.done = 1};
	int signal, err;

	if ((shown.number = kernel_open()) < 0)
		return;
	shown.file = kernel_look(shown.number, &signal);
	shown.how = detail % 4;
	shown.waits = true;
	shown.is_fetched = false;
	kernel_is_crowded = true;
	err = detail < 4 ? valve_link_request(&client, sizeof(client), VALVE_LINK_RM_CLIENT, shown.number, 50)
	                 : valve_link_lend(&done, sizeof(done), VALVE_LINK_KV_DONE, &shown.number, 1,
	                                   valve_shim.link_generation);
	kernel_is_crowded = false;
	shown.waits = false;
	CHECK(err || shown.is_fetched);
	CHECK(err != -EAGAIN || !shown.is_fetched);
	for (size_t i = 0; i < VALVE_REPLIES; i++)
		CHECK(!valve_shim.reply[i].seq);
	kernel_steal(shown.number, false);
	signal = kernel_open(); /* another file, under the number that valved may look for still */
	if (shown_is_heard())
		fetch_shown();
	if (signal >= 0)
		kernel_steal(signal, false);
}

#endif
