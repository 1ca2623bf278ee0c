/* book.c - sorted lists of ranges. Tens of thousands of mappings are normal (kvcached), so look-ups are by bisection. */
#include "memory.h"

unsigned book_index(const struct book *book, uint64_t address)
{
	unsigned low = 0, high = book->count;

	while (low < high) {
		unsigned middle = low + (high - low) / 2;
		if (book->at[middle]->base + book->at[middle]->bytes <= address)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

struct range *book_find(const struct book *book, uint64_t address)
{
	unsigned i = book_index(book, address);

	return i < book->count && book->at[i]->base <= address ? book->at[i] : NULL;
}

bool book_overlaps(const struct book *book, uint64_t base, uint64_t bytes)
{
	unsigned i = book_index(book, base);

	return i < book->count && book->at[i]->base < base + bytes;
}

static void grow(struct book *book)
{
	unsigned room = book->room ? 2 * book->room : 512;
	struct range **at = pages_new(room * sizeof(struct range *));

	if (book->at)
		memcpy(at, book->at, book->count * sizeof(struct range *));
	pages_free(book->at, book->room * sizeof(struct range *));
	book->at = at;
	book->room = room;
}

void book_add(struct book *book, struct range *range)
{
	unsigned i = book_index(book, range->base);

	if (book->count == book->room)
		grow(book);
	memmove(&book->at[i + 1], &book->at[i], (book->count - i) * sizeof(struct range *));
	book->at[i] = range;
	book->count++;
}

void book_remove(struct book *book, struct range *range)
{
	unsigned i = book_index(book, range->base);

	book->count--;
	memmove(&book->at[i], &book->at[i + 1], (book->count - i) * sizeof(struct range *));
}
