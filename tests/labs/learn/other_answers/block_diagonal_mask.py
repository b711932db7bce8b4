def make_mask(chunks):
    columns = [(i, position) for i, (start, num) in enumerate(chunks) for position in range(start + num)]
    rows = [(i, position) for i, position in columns if position >= chunks[i][0]]
    return [[int(i == j and other <= position) for j, other in columns] for i, position in rows]
