/*
 * fuzz_link.c - the session of a process, and any order of what can happen to its link. Each byte is an event (link_events.h), after
 * which the session has one turn; LATER puts the next one into the middle of that turn, before any call of the kernel. valved and
 * the application are in this process, behind a model of the kernel (kernel.c) with a clock of its own.
 *
 * What holds after each turn of an offline process:
 *   waits       launches that waited, and channels that were off, are so still, unless somebody let them who may: the valved
 *               of the link by its answer or order, one that drains, or nobody, where no service shares the GPU. A valved that has
 *               lost us lets nothing go
 *   closed      while a valved that is there has said STOP or HOLD, and we have carried it out, nothing runs
 *   gone        once the lease of a valved that is gone is over, nothing runs beside an online service
 *   refused     who was refused stops until a valved takes it
 *   handed      what valved said it will run the process never enables; valved does once it is told
 *   granted     granted time that ended and that nobody prolonged has stopped
 *   lent        a file that the kernel does not pass is fetched once valved says so, and never another one that came under its
 *               number; once valved has said that it cannot be had, none is lent on that link; no slot of an answer is kept
 *   refusals    of the driver: a stop is made as soon as it refuses no more, and launches wait beside one that it refused; an enable
 *               that it refused is not repeated without leave
 * An online process never waits and is never off. Nobody waits without end, uses a number that is the application's, or touches an
 * unmapped page (kernel.c). A process ends itself only where it waited VALVE_ORPHAN_S over a hole. After all: with a valved that gates
 * nothing everything runs within a minute, and no number, file or page is left.
 *
 * With clang: -fsanitize=fuzzer,address,undefined. Elsewhere main() runs N inputs of its own making: -r N SEED, or the one
 * that stands in hex on the command line.
 */
#include "link/session.c"

#include "link_events.h"

#define SETTLED   12 /* turns: a link that breaks, a new one, a question, its answer; the end of a grant */
#define SETTLE_NS 60000000000u
#define TURN_NS   31000000000u /* the longest rest, and an answer that does not come */

/* ---- turns ---- */
static struct {
	uint32_t calls, generation;
	unsigned char event;
	bool is_late; /* the link was gone by then: what its valved orders from there on, it may end */
} put_off;

static bool is_allowed(void)
{
	return valved.let_go || valved.last_word || !VALVE_CONTROL->online_registered ||
	       VALVE_CONTROL->draining;
}

/* None that takes another thread of the process, and no wake: what valved had begun as we stopped it stops itself. */
static bool can_happen_inside(unsigned char event)
{
	void (*happens)(uint32_t) = events[event / 8];

	return happens && happens != app_closes && happens != app_wants_number && happens != fork_child &&
	       happens != wake && happens != order_of_old && happens != app_shows;
}

void kernel_enters(void)
{
	if (!put_off.calls || --put_off.calls)
		return;
	put_off.is_late = put_off.generation != valve_shim.link_generation;
	events[put_off.event / 8](put_off.event % 8);
	process.may |= put_off.generation == valve_shim.link_generation ? is_allowed() : valved.let_go;
}

/* What keep() does once. */
static void turn(void)
{
#ifdef TRACE
	fprintf(stderr,
	        "t=%llu st=%u gen=%u off=%d held=%d out=%d fail=%u due=%lld wait=%d kept=%d | stopped=%d "
	        "rel=%d ref=%d self=%u ask=%u may_run=%d | page=%d asked=%u letgo=%d order=%u\n",
	        (unsigned long long)(kernel_now() - 100000000000000ull) / 1000, valve_shim.state,
	        valve_shim.link_generation, process.is_off, process.held, process.outside, process.failures,
	        (long long)(process.due_ns - kernel_now()), valve_launches_wait(), valve_launches_kept(),
	        session.stopped, session.released, session.refused, valve_shim.self_stopped, session.ask_seq,
	        session.may_run, !!valved.page, valved.asked, valved.let_go,
	        valved.page ? valved.page->order : 9);
#endif
	if (valve_shim.state == VALVE_STATE_LINKED) {
		serve();
	} else {
		rest(bounded_ns(retry_ns()));
		check_lease();
		reconnect();
	}
	if (valve_shim.state != VALVE_STATE_OFF) {
		check_lease();
		try_again();
	}
}

static uint64_t ended_grant(void)
{
	for (uint32_t gpu = 0; gpu < VALVE_GRANT_GPUS; gpu++) {
		uint64_t end_ns = *grant_of((void *)VALVE_CONTROL_PAGE, gpu);

		if (end_ns > process.let_ns && kernel_now() > end_ns + VALVE_RUN_UNTIL_GRACE_NS)
			return end_ns;
	}
	return 0;
}

/* Or the next try is not due yet. */
static bool is_off_or_refused(void)
{
	return process.is_off || process.refuses || (process.failures && kernel_now() <= process.due_ns);
}

/* Precondition: nothing has happened in the middle of this turn. */
static void check_stops(uint64_t ended_ns)
{
	const volatile struct valve_control *page = VALVE_CONTROL;
	uint64_t now = kernel_now(), lease_ns = page->lease_ns ? page->lease_ns : LEASE_NS;

	if (valve_is_linked() && valved.stops && !session.may_run && page->order == VALVE_ORDER_STOP &&
	    VALVE_REGION->order_done == page->order_seq)
		CHECK(is_off_or_refused());
	if (valve_is_linked() && page->order == VALVE_ORDER_HOLD && page->gate_epoch % 2)
		CHECK(valve_launches_wait());
	if (!valve_is_linked() && page->online_registered && !page->draining && page->heartbeat_ns &&
	    now > page->heartbeat_ns + lease_ns + TICK_NS)
		CHECK(process.is_off || valve_launches_wait());
	if (ended_ns && ended_ns == ended_grant() && !page->draining &&
	    (valve_is_linked() || page->online_registered))
		CHECK(is_off_or_refused());
}

static void check_offline(bool waited, bool was_off, bool was_linked, uint32_t generation)
{
	CHECK(!waited || valve_launches_wait() || process.may || process.blind);
	process.owed = valve_launches_wait() &&
	               (process.owed || (was_linked && generation != valve_shim.link_generation &&
	                                 (waited || !put_off.is_late)));
	process.owed &= valve_shim.state == VALVE_STATE_UNLINKED || valve_launches_kept();
	CHECK(!was_off || process.is_off || process.may || process.may_enable ||
	      (was_linked && VALVE_CONTROL->order != VALVE_ORDER_STOP));
	CHECK(!valve_shim.self_stopped || is_off_or_refused());
	CHECK(valve_is_linked() || valve_shim.state == VALVE_STATE_UNLINKED);
	valved.refused &= !valve_is_linked();
	CHECK(!valved.refused || process.is_off || valve_launches_wait() || process.blind);
}

static void take_turn(bool inside)
{
	uint32_t generation = valve_shim.link_generation;
	bool was_linked = valve_is_linked(), waited = valve_launches_wait(), was_off = process.is_off;
	uint64_t ended_ns = ended_grant(), began_ns = kernel_now();

	process.may = is_allowed();
	process.may_enable = false;
	put_off.generation = generation;
	put_off.is_late = false;
	if (valve_shim.state != VALVE_STATE_OFF)
		turn();
	inside &= !put_off.calls; /* the turn was long enough */
	put_off.calls = 0;
	CHECK(inside || kernel_now() - began_ns <= TURN_NS);
	valved.last_word &= inside;
	if (process.role == VALVE_ROLE_ONLINE)
		CHECK(!process.is_off && !valve_launches_wait());
	if (process.role != VALVE_ROLE_OFFLINE || valve_shim.role != VALVE_ROLE_OFFLINE)
		return;
	check_offline(waited, was_off, was_linked, generation);
	if (!inside && !process.blind)
		check_stops(ended_ns);
}

static size_t step(const unsigned char *data, size_t size)
{
	bool inside = *data / 8 >= LATER && *data / 8 < LATER + 4 && size > 1 && can_happen_inside(data[1]);

	put_off.calls = inside ? 1 + *data % 32 : 0;
	if (inside)
		put_off.event = data[1];
	else if (events[*data / 8])
		events[*data / 8](*data % 8);
	take_turn(inside);
	return 1 + inside;
}

/* Whatever has happened: once the driver does what it is asked, and a valved is there that gates nothing, everything runs. */
static void settle(void)
{
	uint64_t began_ns = kernel_now();

	kernel_limit(1024, false);
	come(1);
	process.refuses = false;
	process.whole = true;
	valved.online = valve_shim.untold = 0;
	for (int turns = 0; turns < SETTLED; turns++) {
		if (valved.page) {
			valved.page->draining = 0;
			if (valved.page->order != VALVE_ORDER_RUN)
				order(VALVE_ORDER_RUN);
			for (uint32_t gpu = 0; gpu < VALVE_GRANT_GPUS; gpu++)
				clear_grant(gpu);
		}
		if (valve_shim.state != VALVE_STATE_OFF)
			turn();
		if (valved.asked) /* number 0 would end the link */
			let_run((uint32_t)turns);
		valved.asked = 0;
		wake(0);
	}
	CHECK(kernel_now() - began_ns < SETTLE_NS);
	CHECK(!process.is_off && !process.failures && !valve_launches_wait());
	CHECK(valve_is_linked() || valve_shim.state == VALVE_STATE_OFF);
}

static void begin(void)
{
	kernel_begin();
	memset(&valved, 0, sizeof(valved));
	memset(&put_off, 0, sizeof(put_off));
	memset(&shown, 0, sizeof(shown));
	memset(&valve_shim, 0, sizeof(valve_shim));
	valve_map_fresh();
	come(1);
	process.whole = true;
	start(VALVE_ROLE_OFFLINE);
	CHECK(valve_is_linked());
}

static void end(void)
{
	put_off.calls = 0;
	valve_link_drop();
	for (int i = 0; i < VALVE_OWNS; i++)
		valve_own_close((enum valve_own)i);
	die();
	forget_old();
	kernel_end();
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
	begin();
	if (!setjmp(process.ended)) {
		for (size_t i = 0; i < size;)
			i += step(data + i, size - i);
		settle();
	}
	end();
	return 0;
}

#ifndef FUZZER
int main(int argc, char **argv)
{
	long count = argc == 4 ? strtol(argv[2], NULL, 10) : 0;
	uint64_t random = argc == 4 ? strtoull(argv[3], NULL, 10) | 1 : 1;
	unsigned char inputs[64];
	size_t told = 0;

	for (const char *hex = argc == 2 ? argv[1] : ""; hex[2 * told] && told < sizeof(inputs); told++)
		CHECK(sscanf(hex + 2 * told, "%2hhx", &inputs[told]) == 1);
	if (told)
		LLVMFuzzerTestOneInput(inputs, told), count = 0;
	for (long i = 0; i < count; i++) {
		for (size_t k = 0; k < sizeof(inputs); k++) {
			random ^= random << 13;
			random ^= random >> 7;
			random ^= random << 17;
			inputs[k] = (unsigned char)(random >> 24);
		}
		LLVMFuzzerTestOneInput(inputs, random % sizeof(inputs));
	}
	printf("%ld inputs\n", told ? 1 : count);
	return 0;
}
#endif
